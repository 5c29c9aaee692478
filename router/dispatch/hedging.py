"""Hedged attempts: starts a second attempt when the first is late, waits for room, or its node may hang.

A request that waits for room on a crowded decode node moves to one that has room. Nothing is computed before the grant,
so that costs no budget, and the first attempt is cancelled before the second one asks for blocks.

A second attempt whose own node may hang is replaced by one elsewhere, so that two faults are not waited for in series.

The first token decides between two attempts, unless it comes from the prefill node of an attempt whose decode node may
hang: then both continue, since each would send the same tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvferry.placement.blocks import crowded
from kvferry.placement.types import NodeKey, NodeView, Placement
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.attempt_planner import AttemptPlanner
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.dispatch.events import NodeSuspected
from kvferry.router.dispatch.hedged_attempts import HedgedAttempts
from kvferry.router.nodes.node_entry import node_key

log = logging.getLogger(__name__)

LATE_FACTOR, MIN_LATE_S = 3.0, 1.0
"""Multiple of its expected time to first token after which an attempt is late, and the minimum of that in seconds."""
GRANT_S = 2.0
"""Seconds for which a request waits for room on a crowded decode node before it looks for another one with room."""
LOOK_AGAIN_S = 0.25
"""Seconds between two looks for another node while an attempt waits for one that may hang."""
MAX_NODES_LEFT = 2
"""Maximum number of crowded decode nodes that one request leaves, since it loses its place in each queue."""


def late_s(placement: Placement) -> float:
    """Return the seconds after which an attempt on this placement is late with its first token.

    For the decode node's first token after it see `ship_late_s`."""
    return max(MIN_LATE_S, LATE_FACTOR * placement.first_token_s)


def ship_late_s(placement: Placement) -> float:
    """Return the seconds, from the prefill node's token on, after which the decode node's first token is late.

    The prompt's wait for its turn is over by then, so it does not count."""
    step_s = placement.decode.rates.step_s if placement.decode else 0.0
    return max(MIN_LATE_S, LATE_FACTOR * (placement.first_token_s - placement.queue_s + step_s))


@dataclass(frozen=True, slots=True)
class Hedge:
    """A second attempt to start: its nodes, its kind as a label, and why, with the nodes that are the reason."""

    placement: Placement
    kind: str
    nodes: list[NodeLease]
    reason: str


class HedgePolicy:
    """Decides whether a request gets a second attempt beside its first one, and on which nodes.

    A late request needs budget. One whose node may hang does not, since it would soon move elsewhere in any case."""

    def __init__(
        self,
        hedged: HedgedAttempts,
        planner: AttemptPlanner,
        context: DispatchContext,
        post: Callable[[NodeSuspected], None],
    ) -> None:
        self._hedged, self._planner, self._context, self._post = hedged, planner, context, post
        self._left_nodes = 0
        self._overdue: int | None = None
        """Number of the attempt that waits for room and was already late for a hedge."""
        self._suspected: int | None = None
        """Number of the attempt beside which a suspicion started another."""
        self._look_at = 0.0
        self._blamed: int | None = None
        """Number of the attempt whose nodes were blamed for its late token: once, however often it is looked at."""

    async def plan(self, is_due: Callable[[], bool], *, late: bool) -> Hedge | None:
        """Return the second attempt, which the caller must start without an await; None if there is to be none.

        is_due: whether the reason still holds. late: the reason is a late token; otherwise a suspected node."""
        hedge = await self._plan(is_due, late=late)
        waits = self._hedged.second or self._hedged.leader
        if not late and (hedge is not None or (waits is not None and waits.suspects)):
            self._look_again()
        return hedge

    def stall(self, stalled_s: float) -> None:
        """Fail all attempts, since none has made progress for `stalled_s` seconds."""
        self._hedged.stall(lambda placement: stalled_s >= late_s(placement))

    async def _plan(self, is_due: Callable[[], bool], *, late: bool) -> Hedge | None:
        first = self._hedged.leader
        if first is None or not is_due():
            return None
        if len(self._hedged.runners) > 1:
            return None if late else await self._replacement(is_due)
        if not (late or first.suspects):
            return None
        if late and self.waits_for_room:
            second, number = await self._elsewhere(first, is_due), first.job.attempt
            if second or first.age_s < late_s(first.placement) or number == self._overdue or not is_due():
                return second
            self._overdue = number
        if late and self._blamed != first.job.attempt:
            self._blamed = first.job.attempt
            self._context.suspect(first.placement, ships=first.ships)
        reuse = await self._planner.reuse()
        suspects = first.suspects
        if first is not self._hedged.leader or not is_due() or not (late or suspects):
            return None
        nodes = [node for node in (first.placement.prefill, first.placement.decode) if node]
        keys = [node_key(node) for node in nodes]
        placement = self._planner.place_second([keys, keys[:1]] if late else [suspects], reuse)
        if placement is None or (late and not self._context.hedges.spend()):
            return None
        kind, reason = ("hedge", "its token is overdue") if late else ("suspicion", "its node may hang")
        self._suspected = None if late else first.job.attempt
        causes = [node for node in nodes if late or node_key(node) in suspects]
        names = ", ".join(node.node_id for node in causes)
        log.info("%s: a second attempt beside the one on %s: %s", first.job.request_id, names, reason)
        return Hedge(placement, kind, causes, reason)

    @property
    def waits_for_blocks(self) -> bool:
        """Return whether the only attempt waits for room or for its ship, so that a second one may yet be needed."""
        first = self._hedged.leader
        return self.waits_for_room or (first is not None and len(self._hedged.runners) == 1 and first.ships)

    @property
    def waits_for_room(self) -> bool:
        """Return whether the only attempt has no token yet, and its decode node is crowded with waiting requests."""
        first = self._hedged.leader
        if first is None or len(self._hedged.runners) > 1 or first.ships or first.decoding:
            return False
        return self._is_crowded(first.placement)

    def next_late_s(self) -> float:
        """Return the seconds after which to check the only attempt: it is late, or may wait for room.

        Infinite for two attempts, and for one whose decode node streams."""
        first = self._hedged.leader
        if first is None or len(self._hedged.runners) > 1 or first.decoding:
            return inf
        if first.ships:
            return ship_late_s(first.placement)
        placement, limit_s = first.placement, late_s(first.placement)
        return min(limit_s, GRANT_S) if limit_s > GRANT_S and self._is_crowded(placement) else limit_s

    def _look_again(self) -> None:
        """Post NodeSuspected again in LOOK_AGAIN_S: another node may have become free or ready by then.

        All streams of a node that may hang do so, so their looks are spaced."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._look_at:
            self._look_at = self._context.looks.at(loop.time() + LOOK_AGAIN_S)
            loop.call_at(self._look_at, self._post_suspicion)

    def _post_suspicion(self) -> None:
        if self._hedged.leader is not None:
            self._post(NodeSuspected(self._hedged.leader.job.attempt))

    async def _replacement(self, is_due: Callable[[], bool]) -> Hedge | None:
        """End a second attempt whose node may hang, and return one on nodes of which none may; None if it must stay.

        The number of attempts stays the same, so this needs no budget."""
        second = self._hedged.second
        if second is None or not second.suspects:
            return None
        reuse = await self._planner.reuse()
        suspects = self._hedged.suspects | self._context.model.suspects
        if second is not self._hedged.second or not second.suspects or not is_due():
            return None
        nodes = [node for node in (second.placement.prefill, second.placement.decode) if node]
        placement = self._planner.place_second([suspects | self._hedged.nodes, suspects], reuse, strict=True)
        if placement is None:
            return None
        causes = [node for node in nodes if node_key(node) in second.suspects]
        names = ", ".join(node.node_id for node in causes)
        log.info("%s: another second attempt in place of that on %s, which may hang", second.job.request_id, names)
        self._hedged.leave(second.job.attempt)
        return Hedge(placement, "suspicion", causes, "the second attempt's node may hang, too")

    async def _elsewhere(self, first: Attempt, is_due: Callable[[], bool]) -> Hedge | None:
        """End an attempt that waits for room and return one on a decode node that has room; None if there is none."""
        tokens = len(first.job.token_ids) + 1

        def full_nodes() -> set[NodeKey]:
            return {view.key for view in self._context.model.capacity.views.values() if not _has_room(view, tokens)}

        decodes = {entry.key for entry in self._context.model.members if entry.lease.role == "decode"}
        if self._left_nodes >= MAX_NODES_LEFT or decodes <= full_nodes():
            return None
        reuse = await self._planner.reuse()
        if first is not self._hedged.leader or not is_due() or not self.waits_for_room:
            return None
        if (placement := self._planner.place_second([full_nodes()], reuse)) is None:
            return None
        self._left_nodes += 1
        nodes = [node for node in (first.placement.decode,) if node]
        log.info("%s leaves %s, where it waits for room", first.job.request_id, nodes[0].node_id)
        self._hedged.clear()
        return Hedge(placement, "room_elsewhere", nodes, "another decode node has room")

    def _is_crowded(self, placement: Placement) -> bool:
        view = self._context.model.capacity.views.get(node_key(placement.decode)) if placement.decode else None
        return view is not None and crowded(view)

    def decide(self, delta: TokenDelta, delivered: int) -> None:
        """Drop all attempts but that of `delta`, unless tokens before it are missing or its decode node may still hang.

        A decode node may be ahead of a prefill node that hangs before it has sent the router its first token."""
        attempt = self._hedged.runners[delta.attempt]
        if delta.index > delivered or (attempt.ships and attempt.suspects):
            return
        if delta.attempt == self._suspected:
            self._context.metrics.false_suspicions.inc()
            log.info("%s: the suspected node's token came first", attempt.job.request_id)
        self._suspected = None
        self._hedged.keep_only(delta.attempt)


def _has_room(node: NodeView, tokens: int) -> bool:
    """Return whether a decode node has free blocks for `tokens` now; true for every other node."""
    blocks = node.lease.blocks_with(blocks_for(tokens, node.lease.block_size))
    return node.role != "decode" or not (crowded(node) or blocks > node.ready_blocks)
