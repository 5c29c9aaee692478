"""Hedged attempts of a request: a second one starts while the first is late, or its node may hang.

A token decides between them, but not the prefill node's of an attempt whose decode node may hang: both go on then,
since each would send the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.placement.types import NodeKey, Placement
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.attempt_planner import AttemptPlanner
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.nodes.node_entry import node_key

log = logging.getLogger(__name__)

LATE, LATE_S = 3.0, 1.0
"""An attempt is late after LATE times its expected time to first token, but not before LATE_S seconds."""


def late_s(placement: Placement) -> float:
    """Return the seconds after which an attempt on this placement is late with its first token.

    After it the decode node has as long for its own first one."""
    return max(LATE_S, LATE * placement.first_token_s)


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


@dataclass(frozen=True, slots=True)
class Hedge:
    """A second attempt to start: its nodes, its kind as a label, and why, with the nodes that gave the reason."""

    placement: Placement
    kind: str
    nodes: list[NodeLease]
    reason: str


class HedgePolicy:
    """Decides whether a request gets a second attempt beside its first one, and on which nodes.

    A late request needs budget. One whose node may hang does not: it would leave that node soon in any case."""

    def __init__(self, hedged: HedgedAttempts, planner: AttemptPlanner, context: DispatchContext) -> None:
        self._hedged, self._planner, self._context = hedged, planner, context
        self._suspected: int | None = None
        """Number of the attempt beside which a suspicion started another."""

    async def plan(self, is_due: Callable[[], bool], *, late: bool) -> Hedge | None:
        """Return the second attempt to start at once, without an await; None if there is to be none.

        is_due: whether the reason still holds. late: the reason is a late token; otherwise a suspected node."""
        first = self._hedged.leader
        if first is None or len(self._hedged.runners) > 1 or not is_due() or not (late or first.suspects):
            return None
        if late:
            self._context.doubt(first.placement, ships=first.ships)
        reuse = await self._planner.reuse()
        suspects = first.suspects
        if first is not self._hedged.leader or not is_due() or not (late or suspects):
            return None
        nodes = [node for node in (first.placement.prefill, first.placement.decode) if node]
        keys = [node_key(node) for node in nodes]
        placement = self._planner.elsewhere([keys, keys[:1]] if late else [suspects], reuse)
        if placement is None or (late and not self._context.hedges.spend()):
            return None
        kind, reason = ("hedge", "its token is overdue") if late else ("suspicion", "its node may hang")
        self._suspected = None if late else first.job.attempt
        causes = [node for node in nodes if late or node_key(node) in suspects]
        names = ", ".join(node.node_id for node in causes)
        log.info("%s: a second attempt beside the one on %s: %s", first.job.request_id, names, reason)
        return Hedge(placement, kind, causes, reason)

    def decide(self, delta: TokenDelta, delivered: int) -> None:
        """Drop all attempts but that of `delta`, unless its next token is as doubtful as before, or an earlier one is.

        The decode node may be ahead of a prefill node that hangs before it told the router its first token."""
        attempt = self._hedged.runners[delta.attempt]
        if delta.index > delivered or (attempt.ships and attempt.suspects):
            return
        if delta.attempt == self._suspected:
            self._context.metrics.false_suspicions.inc()
            log.info("%s: the suspected node's token came first", attempt.job.request_id)
        self._suspected = None
        self._hedged.win(delta.attempt)
