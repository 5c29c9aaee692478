"""HedgedAttempts: the running attempts of one request: usually one, two while it is hedged."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.placement.types import NodeKey, Placement
from kvferry.protocol.lease import NodeLease
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.nodes.node_entry import node_key


class HedgedAttempts:
    """Running attempts of a request.

    `runners` maps attempt numbers to attempts; it is read for every token."""

    def __init__(self) -> None:
        self.runners: dict[int, Attempt] = {}

    @property
    def leader(self) -> Attempt | None:
        """Return the winner, or the oldest running attempt."""
        return next(iter(self.runners.values()), None)

    @property
    def second(self) -> Attempt | None:
        """Return the attempt beside the leader."""
        return next(iter(list(self.runners.values())[1:]), None)

    @property
    def suspects(self) -> frozenset[NodeKey]:
        """Return the nodes that running attempts wait for and that may hang."""
        return frozenset[NodeKey]().union(*(runner.suspects for runner in self.runners.values()))

    @property
    def nodes(self) -> frozenset[NodeKey]:
        """Return the nodes of all running attempts."""
        places = [runner.placement for runner in self.runners.values()]
        return frozenset(node_key(node) for place in places for node in (place.prefill, place.decode) if node)

    def enter(self, attempt: Attempt) -> None:
        """Add a running attempt."""
        self.runners[attempt.job.attempt] = attempt

    def keep_only(self, number: int) -> None:
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
        """Cancel all attempts of a request that will continue elsewhere; return their nodes."""
        places = [runner.placement for runner in self.runners.values()]
        for number in list(self.runners):
            self.leave(number)
        return [node for place in places for node in (place.prefill, place.decode)]

    def stall(self, is_late: Callable[[Placement], bool]) -> None:
        """Fail all attempts, since none has made progress for long.

        is_late: whether an attempt on a placement is late, so that its nodes are at fault: near its deadline a request
        stalls sooner."""
        for runner in self.runners.values():
            runner.stall(at_fault=is_late(runner.placement))

    def close(self, *, cancel: bool) -> None:
        """Close all attempts: the request ended or is given up."""
        for runner in self.runners.values():
            runner.close(cancel=cancel)
