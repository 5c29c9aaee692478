"""Parsing of the body of an HTTP request with a protocol upgrade that the server ignores.

The parser treats everything after the header of such a request as the other protocol. HTTP differs (RFC 9110, 7.8): a
server that ignores the upgrade reads the request as usual. Java's HttpClient asks for h2c with its first POST.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

FRAMING = (b"content-length", b"transfer-encoding")
"""Names of the headers that announce a body and its end."""


class BodyReader(Protocol):
    """Receiver of body events, as from httptools' parser."""

    def on_body(self, body: bytes) -> None:
        """Receive a piece of the body."""

    def on_message_complete(self) -> None:
        """Receive the end of the body."""


class _Body:
    """Parser callbacks that forward one body: the reader has the header, and data after the body is ignored."""

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
    """Return whether a request with these headers has a body; header names are in lower case."""
    return any(name in FRAMING and value.strip() != b"0" for name, value in headers)


def body_parser(headers: Iterable[tuple[bytes, bytes]], reader: BodyReader) -> httptools.HttpRequestParser:
    """Return a parser that has already read a request header with these fields and expects the body."""
    parser = httptools.HttpRequestParser(_Body(reader))
    framing = b"".join(b"%s: %s\r\n" % (name, value) for name, value in headers if name in FRAMING)
    parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
    return parser
