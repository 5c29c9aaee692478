"""Bodies of requests whose protocol upgrade is ignored.

The parser takes whatever follows the header of such a request for the other protocol. HTTP has it otherwise (RFC 9110,
7.8): a server that ignores the wish reads the request as any other. Java's HttpClient asks for h2c with its first POST.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

FRAMING = (b"content-length", b"transfer-encoding")
"""The headers that announce a body and tell where it ends."""


class BodyReader(Protocol):
    """Receiver of body events, as from httptools' parser."""

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class _Body:
    """Passes on the body alone: the header was told already, and what follows the body is not read."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader: BodyReader | None = reader

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.on_body(body)

    def on_message_complete(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.on_message_complete()


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a body follows; names in lower case."""
    return any(name in FRAMING and value.strip() != b"0" for name, value in headers)


def body_parser(headers: Iterable[tuple[bytes, bytes]], reader: BodyReader) -> httptools.HttpRequestParser:
    """A parser that stands behind the header of a request with these headers."""
    parser = httptools.HttpRequestParser(_Body(reader))
    framing = b"".join(b"%s: %s\r\n" % (name, value) for name, value in headers if name in FRAMING)
    parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
    return parser
