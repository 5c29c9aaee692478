"""Limits of a client's HTTP connection (times, bytes, header counts), as settings of a server and constants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of request line plus headers, in bytes; the parser itself has no limit."""
MAX_HEADERS = 200
"""Maximum number of headers of a request, since the server scans each several times."""
MAX_AHEAD = 64
"""Maximum number of pipelined requests of a connection whose earlier ones are not answered."""
FRAMING = 2
"""Maximum size of a chunked body on the wire, as a multiple of `body_bytes`; more ends the connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Connection limits of one server, in seconds and bytes; 0 turns a limit off.

    header_s      maximum time from connect, or from a later request's first byte, to the end of the request's header
    body_s        maximum time between two pieces of a body
    min_rate      minimum rate in bytes per second at which a body must arrive, once body_s has passed, and a response
                  must be read
    request_s     maximum time from the end of a header to the end of the body
    reader_s      maximum time for which a client may read too little of a response
    body_bytes    maximum size of a body. The application rejects a larger one; the server bounds how much it reads
    per_address   maximum number of open connections of one address
    connections   maximum number of open connections in total, below the process's limit of descriptors
    """

    header_s: float = 10.0
    body_s: float = 30.0
    min_rate: float = 0.0
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
