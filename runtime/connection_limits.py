"""Limits of a client connection: times, bytes and headers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MAX_HEADER_BYTES = 64 * 1024
"""Longest request line plus headers, in bytes; the parser itself has no bound."""
MAX_HEADERS = 200
"""Most headers of a request: the server scans each several times."""
MAX_AHEAD = 64
"""Most pipelined requests that a connection may send before the earlier ones are answered."""
FRAMING = 2
"""Most bytes that a chunked body may take on the wire, as a multiple of `body_bytes`; more ends the connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Connection limits of one server, in seconds and bytes; 0 turns a bound off.

    header_s      from connect, or from the first byte of a later request, to the end of the request's header
    body_s        longest gap between two pieces of a body
    least_rate    bytes a second at which a body must arrive, from body_s after its start, and a response must be read
    request_s     from the end of a header to the end of its body
    reader_s      longest time for which a client may read too little of a response
    body_bytes    longest body. The application rejects a longer one; the server only bounds how much of it it reads
    per_address   most open connections of one address
    connections   most open connections of all addresses: fewer than the process may have descriptors
    """

    header_s: float = 10.0
    body_s: float = 30.0
    least_rate: float = 0.0
    request_s: float = 600.0
    reader_s: float = 30.0
    body_bytes: int = 0
    per_address: int = 0
    connections: int = 0


class Phase(Enum):
    """Part of a request to which a connection's next byte belongs.

    The response to an earlier request may be in flight in every phase."""

    BETWEEN = auto()
    HEADER = auto()
    BODY = auto()
