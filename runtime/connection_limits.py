"""Limits of a client connection: times, bytes and headers."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEADER_BYTES = 64 * 1024
"""Of a request line with its headers; the parser itself has no bound."""
MAX_HEADERS = 200
"""Each is looked at several times."""
MAX_AHEAD = 64
"""Requests that a connection may bring before those in front of them are answered."""
FRAMING = 2
"""What a body may take on the wire, chunked, as a multiple of `body_bytes`; more ends the connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Connection limits of one server, in seconds and bytes; 0 turns a bound off.

    header_s      from the connection, or the first byte of a later request, to the end of the request's header
    body_s        between two pieces of a body
    least_rate    bytes a second that a body must bring, from body_s after its beginning on, and an answer's reader take
    request_s     from the end of a header to the end of its body
    reader_s      without enough of an answer being taken
    body_bytes    longest body. To refuse a longer one is the application's part: here, what is read of it is bounded
    per_address   open connections of one address
    """

    header_s: float = 10.0
    body_s: float = 30.0
    least_rate: float = 0.0
    request_s: float = 600.0
    reader_s: float = 30.0
    body_bytes: int = 0
    per_address: int = 0
