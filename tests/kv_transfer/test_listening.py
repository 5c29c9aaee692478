"""Only who dials the host that a link listens on gets through to it."""

from __future__ import annotations

import socket

import pytest
from link_processes import Recorder
from waiting import wait_for

from kv_transfer.listening import addresses_of, restrict
from kv_transfer.ucx import UcxLink
from process.address import parse_host_port

OTHER = "127.0.0.2"
"""Another address of every Linux machine."""


def reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture
def listener():
    """A socket of this process that listens on all addresses, as UCX's does."""
    with socket.socket() as made:
        made.bind(("0.0.0.0", 0))
        made.listen()
        yield made


@pytest.fixture
def link(request):
    made = UcxLink("127.0.0.1", listen=request.param)
    recorder = Recorder()
    made.start(recorder)
    yield made, recorder
    made.stop()


@pytest.mark.parametrize(
    ("link", "others"), [(None, False), ("localhost", False), ("0.0.0.0", True)], indirect=["link"]
)
def test_a_link_is_reached_at_the_host_it_listens_on(link, others):
    link, recorder = link
    _, port = parse_host_port(link.address)
    assert reached(OTHER, port) is others
    client = UcxLink("127.0.0.1")
    client.start(Recorder())
    client.submit(lambda: client.send(client.connect(link.address), b"hi"))
    wait_for(lambda: recorder.messages)
    client.stop()


@pytest.mark.parametrize(
    ("addresses", "passed"),
    [
        ({"127.0.0.1"}, [True, False]),
        ({"127.0.0.1", OTHER}, [True, True]),
        ({"10.1.2.3", OTHER, "127.0.0.9"}, [False, True]),
        (set(), [False, False]),
    ],
)
def test_segments_for_other_addresses_are_dropped(listener, addresses, passed):
    port = listener.getsockname()[1]
    restrict(port, addresses)
    assert [reached("127.0.0.1", port), reached(OTHER, port)] == passed


def test_a_port_without_a_listener_is_an_error(listener):
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(OSError, match=str(port)):
        restrict(port, {OTHER})


def test_hosts_and_their_addresses():
    assert addresses_of("127.0.0.1") == addresses_of("localhost") == {"127.0.0.1"}
    assert addresses_of("0.0.0.0") is addresses_of("::") is addresses_of("") is None
    assert addresses_of("::1") == addresses_of("[::1]") == set()
