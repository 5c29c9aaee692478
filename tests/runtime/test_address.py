"""host:port as text, both ways."""

from __future__ import annotations

import socket

import pytest

from kvferry.runtime import address
from kvferry.runtime.address import family_of, host_port, is_loopback, parse_host_port


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("127.0.0.1", 80, "127.0.0.1:80"), ("worker-0.pods", 9000, "worker-0.pods:9000"), ("fe80::1", 1, "[fe80::1]:1")],
)
def test_there_and_back(host: str, port: int, text: str) -> None:
    assert host_port(host, port) == text
    assert parse_host_port(text) == (host, port)


def test_brackets_are_not_doubled() -> None:
    assert host_port("[::1]", 8000) == "[::1]:8000"


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:x", "host:0", "host:65536", "::1:80", "[::1]80", "a:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"an address must|a port must"):
        parse_host_port(text)


@pytest.mark.parametrize(
    ("host", "family", "bound"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("localhost", socket.AF_INET, "localhost"),
        ("::1", socket.AF_INET6, "::1"),
        ("[::1]", socket.AF_INET6, "::1"),
        ("[fd00::7]", socket.AF_INET6, "fd00::7"),
        ("[::]", socket.AF_INET6, "::"),
    ],
)
def test_a_server_listens_at_addresses_of_either_family(
    host: str, family: socket.AddressFamily, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "knows_ipv6", lambda: True)
    assert family_of(host) == (family, bound)


def test_every_address_is_every_ipv4_address_where_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "knows_ipv6", lambda: False)
    assert family_of("::") == family_of("[::]") == (socket.AF_INET, "0.0.0.0")
    assert family_of("::1")[0] == socket.AF_INET6, "an address that is asked for by name is not given up"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_loopback_is_known_in_each_form(host: str) -> None:
    assert is_loopback(host)


def test_a_machine_without_ipv4_reaches_itself_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.loopback() == "127.0.0.1"

    class NoIPv4(socket.socket):
        def bind(self, where: object) -> None:
            raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", NoIPv4)
    assert address.loopback() == "::1"
