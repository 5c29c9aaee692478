"""Hedged attempts of a request: a second one starts while the first is late."""

from __future__ import annotations

from kvferry.placement.types import NodeKey
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.nodes.node_entry import node_key


class HedgedAttempts:
    """Running attempts of a request; the first token decides between them.

    `runners`: by their numbers, looked up for every token. `runners`: by their numbers, looked at for every token."""

    def __init__(self) -> None:
        self.runners: dict[int, Attempt] = {}

    @property
    def leader(self) -> Attempt | None:
        """The one that won, or the older one."""
        return next(iter(self.runners.values()), None)

    @property
    def nodes(self) -> frozenset[NodeKey]:
        """Return the nodes of all running attempts."""
        places = [runner.placement for runner in self.runners.values()]
        return frozenset(node_key(node) for place in places for node in (place.prefill, place.decode) if node)

    def enter(self, attempt: Attempt) -> None:
        self.runners[attempt.job.attempt] = attempt

    def win(self, number: int) -> None:
        """It made a token: the others are dropped."""
        for other in self.runners.keys() - {number}:
            self.leave(other)

    def succeed(self, number: int, successor: Attempt) -> None:
        """The node of the one has handed it over to the other's: that runs in its place."""
        self.runners.pop(number).close(cancel=False)
        self.enter(successor)

    def leave(self, number: int) -> None:
        """It failed or lost."""
        self.runners.pop(number).close(cancel=True)

    def stall(self) -> None:
        for runner in self.runners.values():
            runner.stall()

    def close(self, *, cancel: bool) -> None:
        """The request ended, or is given up."""
        for runner in self.runners.values():
            runner.close(cancel=cancel)
