"""host:port as text, both ways."""

from __future__ import annotations

import pytest

from process.address import host_port, parse_host_port


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
    with pytest.raises(ValueError, match=r"an address is|a port is"):
        parse_host_port(text)
