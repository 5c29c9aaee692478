"""Count of a server's open connections by client address, with limits per address and in total."""

from __future__ import annotations

from collections import Counter

from kvferry.protocol.errors import Overloaded
from kvferry.runtime.rejection_throttle import RejectionThrottle


class ConnectionCounts:
    """Open connections of one server, counted and limited by client address.

    per_address, limit: most open connections of one address and in total; 0: no limit. throttle: delays the
    rejections of clients whose requests keep being rejected; None: no delay."""

    def __init__(self, per_address: int = 0, throttle: RejectionThrottle | None = None, limit: int = 0) -> None:
        self._per_address, self._throttle, self._limit = per_address, throttle, limit
        self._open, self._total = Counter[str](), 0

    def enter(self, address: str) -> Overloaded | None:
        """Count a connection until `leaves`; return the error to answer if it exceeds the limit."""
        self._open[address] += 1
        self._total += 1
        if 0 < self._limit < self._total:
            return Overloaded(f"too many connections, the limit is {self._limit}", retry_after=1.0)
        if 0 < self._per_address < self._open[address]:
            return Overloaded(f"too many connections from {address}, the limit is {self._per_address}", retry_after=1.0)
        return None

    def leaves(self, address: str) -> None:
        """Stop counting a connection that `enter` counted, rejected or not."""
        self._open[address] -= 1
        self._total -= 1
        if not self._open[address]:
            del self._open[address]

    def delay_s(self, address: str, took_s: float) -> float:
        """Return the delay of a rejection in seconds; took_s: processing time of the rejected request."""
        return self._throttle.delay_s(address, took_s) if self._throttle else 0.0
