"""Migration of a stream away from a draining node: places a successor attempt that takes over its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.placement.types import NodeKey
from kvferry.protocol.errors import Moved
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job
from kvferry.router.dispatch.attempt_planner import AttemptPlanner
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.dispatch.events import Drains, Event
from kvferry.router.dispatch.failures import Failure
from kvferry.router.dispatch.hedging import HedgedAttempts
from kvferry.router.dispatch.migration_attempt import MigrationAttempt
from kvferry.router.nodes.node_entry import node_key

PAUSE_S = 0.5
"""Before a stream is tried to be moved again: when no node could take it, or the one that was to did not."""


class Migration:
    """Migration of one dispatch's stream.

    The successor is no runner until the attempt before it has delivered all its tokens. The successor is none of the
    race's runners until the one before it has told all that it made."""

    def __init__(
        self, hedged: HedgedAttempts, planner: AttemptPlanner, context: DispatchContext, post: Callable[[Event], None]
    ) -> None:
        self._hedged, self._planner, self._context, self._post = hedged, planner, context, post
        self._successor: MigrationAttempt | None = None
        self._unfit: set[NodeKey] = set()

    def concerns(self, number: int) -> bool:
        """Return whether that is the successor's number."""
        return self._successor is not None and self._successor.job.attempt == number

    @property
    def goes_to(self) -> NodeLease | None:
        """Return the node on which the successor is to continue, if any."""
        return self._successor.placement.decode if self._successor else None

    async def begin(self, number: int, make_job: Callable[[str], Job]) -> bool:
        """The node of attempt `number` drains: have it hand its stream over.

        Whether a successor was made; if not, and whenever one fails, it is tried again for as long as the attempt runs
        there."""
        reuse = await self._planner.reuse()
        if self.concerns(number):  # it is asked again once the stream is there
            self._again(number)
        if number not in self._hedged.runners or self._successor:
            return False
        attempt = self._hedged.leader
        placement = None
        if attempt is not None and attempt.job.attempt == number and attempt.decoding:
            if attempt.decode_node and not attempt.decode_node.drains:
                return False  # it stays after all
            placement = self._planner.onward(attempt.placement, self._unfit, reuse)
        if attempt is None or placement is None:
            self._unfit.clear()
            self._again(number)
            return False
        self._context.metrics.retries.labels("move").inc()
        successor = self._context.launch(make_job(attempt.job.request_id), placement, self._post, attempt)
        assert isinstance(successor, MigrationAttempt)
        self._successor = successor
        return True

    def settles(self, failure: Failure) -> bool:
        """Return whether what ended an attempt is a move, which came about or not, and nothing else is to be done for
        it. One to an earlier successor, which was given up, is a failure like any other."""
        successor = self._successor
        if successor is None:
            return False
        if isinstance(failure.error, Moved) and failure.error.later == successor.job.attempt:
            self._successor = None
            self._hedged.succeed(failure.attempt, successor)
            self._planner.goes_to(self._hedged.nodes)
            successor.inherit()
            return True
        self.end()
        if failure.attempt != successor.job.attempt:
            return False
        self._unfit.update(map(node_key, failure.culprits))
        if self._hedged.leader:
            self._again(self._hedged.leader.job.attempt)
        return True

    def end(self) -> None:
        """End the migration with its dispatch or attempt."""
        if self._successor:
            self._successor.close(cancel=True)
        self._successor = None

    def _again(self, number: int) -> None:
        asyncio.get_running_loop().call_later(PAUSE_S, self._post, Drains(number))
