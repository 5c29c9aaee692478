"""Attempt on the node that takes over a stream with its blocks from a draining node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.placement.types import Placement
from kvferry.protocol.errors import BlocksCorrupt, NodeLost, TransferFailed
from kvferry.protocol.messages import Job, MoveRequest, TokenDelta
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.failures import known
from kvferry.router.nodes.node_entry import node_key

UNTOLD_S = 5.0
"""How long a move whose call broke may take to show what became of it."""


class MigrationAttempt(Attempt):
    """Successor attempt whose tokens are held back until `inherit`, when all tokens of its predecessor are out.

    It fails where it does not come to that. It fails where it does not come to that."""

    def __init__(
        self, forerunner: Attempt, job: Job, placement: Placement, post: Callable[[Event], None], **parts: Any
    ) -> None:
        self._forerunner, self._tell = forerunner, post
        self._kept: list[Event] | None = []
        nothing_to_compute = replace(placement, cached_len=len(job.token_ids))
        super().__init__(job, nothing_to_compute, self._keep, **parts)

    def close(self, *, cancel: bool) -> None:
        super().close(cancel=cancel)
        self._tell = self._post

    def inherit(self) -> None:
        """The forerunner's node has handed the stream over to this one."""
        kept, self._kept = self._kept or [], None
        for event in kept:
            self._tell(event)

    def _keep(self, event: Event) -> None:
        if self._kept is not None and isinstance(event, TokenDelta):
            self._kept.append(event)
        else:
            self._tell(event)

    async def _begin(self) -> None:
        source, target = self._forerunner.placement.decode, self.placement.decode
        assert source
        assert target
        before, now = self._forerunner.job, self.job
        try:
            await self._client.move(source, MoveRequest(before.request_id, before.attempt, now.attempt, target.target))
        except NodeLost as error:
            # It may be under way still: as a rule the forerunner's end, or the stream's, settles what became of it.
            await asyncio.sleep(UNTOLD_S)
            if self._kept is not None or not self.decoding:
                self._fail(TransferFailed(f"it is not known what became of the move: {error}"), source)
        except Exception as error:
            # The node's own word that this move did not come about, even if the stream is gone from there.
            if isinstance(error, BlocksCorrupt):
                self._breakers.corrupt(node_key(source), node_key(target))
            culprit = target if self._kept is not None else source
            self._fail(TransferFailed(str(known(error, source))), culprit)
