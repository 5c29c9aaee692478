"""Only who dials an address that a link listens on gets through to it; names are looked up beside the link."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from kvferry.kv_transfer.listening_sockets import MAX_LOOKUPS, Resolver, listeners
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.address import parse_host_port
from tests.kv_transfer.link_processes import Recorder
from tests.waiting import wait_for

OTHER = "127.0.0.2"
"""Another address of every Linux machine."""


def reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


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
    ("host", "families"),
    [
        ("127.0.0.1", {socket.AF_INET}),
        ("[::1]", {socket.AF_INET6}),
        ("::1", {socket.AF_INET6}),
        ("0.0.0.0", {socket.AF_INET}),
        ("", {socket.AF_INET, socket.AF_INET6}),
        ("::", {socket.AF_INET, socket.AF_INET6}),
        ("[::]", {socket.AF_INET, socket.AF_INET6}),
    ],
)
def test_all_addresses_of_a_host_have_one_port(host, families):
    try:
        made = listeners(host, 0)
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    assert {each.family for each in made} == families
    assert len({each.getsockname()[1] for each in made}) == 1
    for each in made:
        each.close()


def test_an_unknown_host_is_a_config_error():
    with pytest.raises(ConfigError, match="no-such-host"):
        UcxLink("127.0.0.1", listen="no-such-host.invalid").start(Recorder())


def test_a_name_that_resolves_slowly_delays_nothing_else(monkeypatch):
    """It held the link's thread, and with it every ship, for as long as the resolver took."""
    real, held = socket.getaddrinfo, threading.Event()

    def slow(host, *args, **more):
        if host == "slow.example":
            held.wait(10)
            raise OSError("timed out")
        return real(host, *args, **more)

    def dial() -> None:
        client.connect("slow.example:7")

    recorder = Recorder()
    server, client, lost = UcxLink("127.0.0.1"), UcxLink("127.0.0.1", connect_timeout=0.3), Recorder()
    server.start(recorder)
    client.start(lost)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    _, port = parse_host_port(server.address)
    began = time.monotonic()
    client.submit(dial)
    client.submit(lambda: client.send(client.connect(f"localhost:{port}"), b"hi"))
    wait_for(lambda: recorder.messages, 5)
    assert time.monotonic() - began < 2
    wait_for(lambda: lost.lost, 5)
    assert "cannot reach slow.example:7" in str(lost.lost[0][1])
    held.set()
    client.stop()
    server.stop()


def test_lookups_under_way_are_bounded(monkeypatch):
    held, ended, calls = threading.Event(), [], []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: held.wait(10) and [])
    resolver = Resolver(calls.append)
    for _ in range(MAX_LOOKUPS + 2):
        resolver.resolve("name.example:1", lambda *found: None, ended.append)
    assert len(ended) == 2
    assert "being resolved" in str(ended[0])
    held.set()
    wait_for(lambda: len(calls) == MAX_LOOKUPS)
    for call in calls:
        call()
    assert len(ended) == MAX_LOOKUPS + 2


def test_what_is_no_address_is_refused():
    with pytest.raises(ValueError, match="host:port"):
        Resolver(lambda call: call()).resolve("nonsense", lambda *found: None, lambda error: None)


def test_what_is_submitted_after_a_stop_is_written_to_no_descriptor(monkeypatch):
    """A name that was found late woke a link that had closed its descriptor, whose number was another's by then."""
    link = UcxLink("127.0.0.1")
    link.start(Recorder())
    link.stop()
    written = []
    monkeypatch.setattr(os, "eventfd_write", lambda *args: written.append(args))
    link._loop._sleeping = True
    link.submit(lambda: None)
    assert written == []
