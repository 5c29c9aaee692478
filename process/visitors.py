"""Who is connected to a server, by address."""

from __future__ import annotations

from collections import Counter

from kvferry.process.toll import Toll
from kvferry.protocol.errors import Overloaded


class Visitors:
    """Of one server. per_address: open connections that one address may have; 0: any number. toll: what those pay
    whose requests come to nothing; None: nothing."""

    def __init__(self, per_address: int = 0, toll: Toll | None = None) -> None:
        self._per_address, self._toll = per_address, toll
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
        return self._toll.delay_s(address, took_s) if self._toll else 0.0
