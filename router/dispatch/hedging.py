"""Hedged attempts of a request: a second one starts while the first is late."""

from __future__ import annotations

from kvferry.placement.types import NodeKey
from kvferry.protocol.lease import NodeLease
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.nodes.node_entry import node_key


class HedgedAttempts:
    """Running attempts of a request; the first token decides between them.

    `runners` maps attempt numbers to attempts; it is read for every token."""

    def __init__(self) -> None:
        self.runners: dict[int, Attempt] = {}

    @property
    def leader(self) -> Attempt | None:
        """Return the winner, or the oldest running attempt."""
        return next(iter(self.runners.values()), None)

    @property
    def nodes(self) -> frozenset[NodeKey]:
        """Return the nodes of all running attempts."""
        places = [runner.placement for runner in self.runners.values()]
        return frozenset(node_key(node) for place in places for node in (place.prefill, place.decode) if node)

    def enter(self, attempt: Attempt) -> None:
        """Add a running attempt."""
        self.runners[attempt.job.attempt] = attempt

    def win(self, number: int) -> None:
        """Drop all attempts but `number`, which delivered a token."""
        for other in self.runners.keys() - {number}:
            self.leave(other)

    def succeed(self, number: int, successor: Attempt) -> None:
        """Replace an attempt by its successor after the handover."""
        self.runners.pop(number).close(cancel=False)
        self.enter(successor)

    def leave(self, number: int) -> None:
        """Cancel an attempt that failed or lost."""
        self.runners.pop(number).close(cancel=True)

    def clear(self) -> list[NodeLease | None]:
        """Cancel all attempts of a request that goes on; return their nodes."""
        places = [runner.placement for runner in self.runners.values()]
        for number in list(self.runners):
            self.leave(number)
        return [node for place in places for node in (place.prefill, place.decode)]

    def stall(self) -> None:
        """Fail all attempts for missing progress."""
        for runner in self.runners.values():
            runner.stall()

    def close(self, *, cancel: bool) -> None:
        """Close all attempts: the request ended or is given up."""
        for runner in self.runners.values():
            runner.close(cancel=cancel)
