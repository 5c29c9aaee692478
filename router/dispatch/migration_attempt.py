"""MigrationAttempt: successor of an attempt on a draining node; holds its tokens back until the stream has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.placement.types import Placement
from kvferry.protocol.errors import BlocksCorrupt, NodeLost, TransferFailed
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job, MoveRequest, TokenDelta
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.failures import known
from kvferry.router.nodes.node_entry import node_key

MAX_MOVE_S = 120.0
"""Longest wait for a node to move a stream, in seconds. The node aborts a move whose call is given up."""
OUTCOME_WAIT_S = 5.0
"""Longest time to wait for the outcome of a move after its call broke, in seconds."""


class MigrationAttempt(Attempt):
    """Successor attempt that holds its tokens back until `inherit`, when its predecessor has delivered all of its own.

    It fails if the handover does not happen."""

    def __init__(
        self, predecessor: Attempt, job: Job, placement: Placement, post: Callable[[Event], None], **parts: Any
    ) -> None:
        self._predecessor, self._forward = predecessor, post
        self._kept: list[Event] | None = []
        nothing_to_compute = replace(placement, cached_len=len(job.token_ids))
        super().__init__(job, nothing_to_compute, self._keep, **parts)

    def close(self, *, cancel: bool) -> None:
        """Close the attempt; see Attempt.close."""
        super().close(cancel=cancel)
        self._forward = self._post

    def inherit(self) -> None:
        """Release the tokens held back: the draining node has handed over the stream."""
        kept, self._kept = self._kept or [], None
        for event in kept:
            self._forward(event)

    def _keep(self, event: Event) -> None:
        if self._kept is not None and isinstance(event, TokenDelta):
            self._kept.append(event)
        else:
            self._forward(event)

    async def _begin(self) -> None:
        source, target = self._predecessor.placement.decode, self.placement.decode
        assert source
        assert target
        before, now = self._predecessor.job, self.job
        overdue = asyncio.get_running_loop().call_later(MAX_MOVE_S, self._overdue, target)
        try:
            await self._client.move(source, MoveRequest(before.request_id, before.attempt, now.attempt, target.target))
        except NodeLost as error:
            # The move may still run on the node: usually the end of the old attempt or stream decides its outcome.
            await asyncio.sleep(OUTCOME_WAIT_S)
            if self._kept is not None or not self.decoding:
                self._fail(TransferFailed(f"the outcome of the migration is unknown: {error}"), source)
        except Exception as error:
            # The node itself reports that the move failed, even if it no longer has the stream.
            if isinstance(error, BlocksCorrupt):
                self._breakers.corrupt(node_key(source), node_key(target))
            faulty = target if self._kept is not None else source
            self._fail(TransferFailed(str(known(error, source))), faulty)
        finally:
            overdue.cancel()

    def _overdue(self, target: NodeLease) -> None:
        """Fail the move unless the handover has happened."""
        if self._kept is not None:
            self._fail(TransferFailed(f"the migration takes longer than {MAX_MOVE_S:g} s"), target)
