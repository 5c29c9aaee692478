"""Migration: moves a stream off a draining node, by a successor attempt that takes over its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.placement.types import NodeKey, Placement
from kvferry.protocol.errors import Moved
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job
from kvferry.router.dispatch.attempt_planner import AttemptPlanner
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.dispatch.events import Event, NodeDrains
from kvferry.router.dispatch.failures import Failure
from kvferry.router.dispatch.hedged_attempts import HedgedAttempts
from kvferry.router.dispatch.migration_attempt import MigrationAttempt
from kvferry.router.nodes.node_entry import node_key

PAUSE_S, MAX_PAUSE_S = 0.5, 8.0
"""Pause before another try to move a stream, in seconds: after no node could take it, and after several moves failed.

A move over a slow link pauses the stream before it fails, so each failed move doubles the pause."""


class Migration:
    """Migration of one dispatch's stream.

    The successor does not count as a running attempt until its predecessor has delivered all its tokens."""

    def __init__(
        self, hedged: HedgedAttempts, planner: AttemptPlanner, context: DispatchContext, post: Callable[[Event], None]
    ) -> None:
        self._hedged, self._planner, self._context, self._post = hedged, planner, context, post
        self._successor: MigrationAttempt | None = None
        self._excluded: frozenset[NodeKey] = frozenset()
        self._failed = 0
        """Moves that failed since the last one that succeeded."""

    def is_successor(self, number: int) -> bool:
        """Return whether `number` is the successor's attempt number."""
        return self._successor is not None and self._successor.job.attempt == number

    @property
    def target(self) -> NodeLease | None:
        """Return the node on which the successor is to continue, if the stream moves now."""
        return self._successor.placement.decode if self._successor else None

    async def begin(self, number: int, make_job: Callable[[str, Placement], Job]) -> bool:
        """Start a successor for attempt `number`, whose node drains; return whether one was started.

        Without a successor, or after one failed, it tries again for as long as the attempt runs on the draining node.
        The first token must have been delivered: after the handover nobody listens to the prefill node, which sends it.
        """
        reuse = await self._planner.reuse()
        if self.is_successor(number):  # The successor's node drains too: ask again once the stream is there.
            self._retry_later(number)
        if number not in self._hedged.runners or self._successor:
            return False
        attempt = self._hedged.leader
        placement, is_single = None, len(self._hedged.runners) == 1
        if attempt and is_single and attempt.job.attempt == number and attempt.decoding and self._planner.begun:
            if attempt.decode_node and not attempt.decode_node.drains:
                return False  # the node no longer drains
            placement = self._planner.place_migration(attempt.placement, self._excluded, reuse)
        if attempt is None or placement is None:
            self._excluded = frozenset()
            self._retry_later(number)
            return False
        successor = self._context.launch(make_job(attempt.job.request_id, placement), placement, self._post, attempt)
        assert isinstance(successor, MigrationAttempt)
        self._successor = successor
        return True

    def handles(self, failure: Failure) -> bool:
        """Return whether a failure belongs to the migration and needs no retry.

        This holds for a completed move and for a failed one. A move to an earlier successor that was given up is an
        ordinary failure."""
        successor = self._successor
        if successor is None:
            return False
        if isinstance(failure.error, Moved) and failure.error.later == successor.job.attempt:
            self._successor, self._failed = None, 0
            self._hedged.succeed(failure.attempt, successor)
            self._planner.runs_on(self._hedged.nodes)
            successor.inherit()
            return True
        self.end()
        if failure.attempt != successor.job.attempt:
            return False
        self._excluded |= {*map(node_key, failure.at_fault)}
        if self._hedged.leader:
            self._retry_later(self._hedged.leader.job.attempt, min(PAUSE_S * 2**self._failed, MAX_PAUSE_S))
        self._failed += 1
        return True

    def end(self) -> None:
        """End the migration with its dispatch or attempt."""
        if self._successor:
            self._successor.close(cancel=True)
        self._successor = None

    def _retry_later(self, number: int, pause_s: float | None = None) -> None:
        asyncio.get_running_loop().call_later(pause_s or PAUSE_S, self._post, NodeDrains(number))
