"""Open connections of a server by client address."""

from __future__ import annotations

from collections import Counter

from kvferry.protocol.errors import Overloaded
from kvferry.runtime.rejection_throttle import RejectionThrottle


class ConnectionCounts:
    """Connection counts of one server.

    per_address: open connections that one address may have; 0: any number. throttle: what those pay whose requests come
    to nothing; None: nothing."""

    def __init__(self, per_address: int = 0, throttle: RejectionThrottle | None = None) -> None:
        self._per_address, self._throttle = per_address, throttle
        self._open = Counter[str]()

    def enter(self, address: str) -> Overloaded | None:
        """One more connection, until it `leaves`; what to answer it if it is one too many."""
        self._open[address] += 1
        if 0 < self._per_address < self._open[address]:
            return Overloaded(f"there are {self._per_address} connections from {address}", retry_after=1.0)
        return None

    def leaves(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def delay_s(self, address: str, took_s: float) -> float:
        """Seconds that a refusal has to wait, of what took so many."""
        return self._throttle.delay_s(address, took_s) if self._throttle else 0.0
