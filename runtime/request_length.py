"""Byte and header counts of the request that a connection is reading, checked against the connection's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvferry.protocol.errors import HeaderTooLong, InvalidRequest, KvferryError, Overloaded, RequestTooLarge
from kvferry.runtime.connection_limits import FRAMING, MAX_AHEAD, MAX_HEADER_BYTES, MAX_HEADERS

_AROUND = len(b": \r\n")


@dataclass(slots=True)
class RequestLength:
    """Length of the request that a connection is reading.

    longest   maximum size of a body in bytes; 0: no limit
    received  total number of bytes received
    body      number of bytes received of the body, without chunk framing
    trailers  number of headers received after the body
    """

    longest: int
    received: int = 0
    body: int = 0
    trailers: int = 0

    def begin(self) -> None:
        """Reset the counts for a new request."""
        self.received = self.body = self.trailers = 0

    def count_fault(self) -> KvferryError:
        """Return the error of a request with too many headers."""
        return HeaderTooLong(f"the request has more than {MAX_HEADERS} headers")

    def header_fault(self, url: bytes, headers: Sequence[tuple[bytes, bytes]], ahead: int) -> KvferryError | None:
        """Return an error if the complete header is too long or too many requests are pipelined.

        ahead: earlier requests of the connection whose responses have not begun."""
        if ahead > MAX_AHEAD:
            return Overloaded(f"more than {MAX_AHEAD} requests were pipelined", retry_after=1.0)
        length = len(url) + sum(map(len, chain.from_iterable(headers))) + _AROUND * len(headers)
        if length > MAX_HEADER_BYTES:
            return _long_header()
        return None

    def begun_header_fault(self) -> KvferryError | None:
        """Return an error if the incomplete header is already too long."""
        return _long_header() if self.received > MAX_HEADER_BYTES else None

    def trailer_fault(self) -> KvferryError | None:
        """Count one more trailer, which no code reads; return an error if there are too many."""
        self.trailers += 1
        too_many = HeaderTooLong(f"the request has more than {MAX_HEADERS} trailers")
        return too_many if self.trailers > MAX_HEADERS else None

    def body_fault(self) -> KvferryError | None:
        """Return an error if the body is too long or its chunks are too small, since each chunk costs the same."""
        if not self.longest:
            return None
        beyond = self.received - MAX_HEADER_BYTES
        if beyond > FRAMING * self.longest:
            return RequestTooLarge(f"the request's body is longer than {self.longest} bytes")
        if beyond > FRAMING * (self.body + MAX_HEADER_BYTES):
            return InvalidRequest("the chunks of the request's body are too small")
        return None


def _long_header() -> KvferryError:
    return HeaderTooLong(f"the request's header is longer than {MAX_HEADER_BYTES} bytes")
