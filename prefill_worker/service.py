"""The prefill role: takes attempts over HTTP, asks decode for a grant, computes, ships, commits.

An attempt's life: offered to its decode node → granted → in the engine → first token to the router, commit to decode →
acknowledged. Without a target it only passes through the engine. All state here belongs to the asyncio loop; the sender
calls from the link thread and is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response

from engine.events import Computed, Event, Failed, Generated
from engine.request import Key, key_of
from kv_transfer.ports import ShipStats
from kv_transfer.sender import Sender
from node.frames import FrameResponse
from node.pool_memory import PoolMemory
from node.service import Base
from process.http import read_message
from protocol.errors import Cancelled, Draining, InvalidRequest, KvferryError
from protocol.messages import AttemptFailed, CancelRequest, FirstToken, Job, PrefillRequest, ShipDone


@dataclass(slots=True, eq=False)
class Answer:
    """To one `POST /attempts/prefill`, as long as its attempt goes on. `outbox` feeds the response; None ends it."""

    job: Job
    transfer: int | None = None
    outbox: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class PrefillService:
    """Joins the engine and the sender of a prefill node."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._answers: dict[Key, Answer] = {}
        self._ships: dict[int, Answer] = {}
        self._link = base.link
        memory = PoolMemory(base.parts.kv)
        self._sender = Sender(
            self._link,
            memory,
            _OnLoop(self, base),
            grant_timeout=base.settings.grant_timeout,
            verify=base.verify_checksums,
        )
        self._link.start(self._sender)
        base.app.post("/attempts/prefill")(self.post_prefill)
        base.app.post("/attempts/cancel", status_code=202)(self.post_cancel)

    async def post_prefill(self, request: Request) -> Response:
        """Begin an attempt; the response streams FirstToken, then ShipDone, or AttemptFailed."""
        self._base.require_ready()
        answer = self._begin(await read_message(request, PrefillRequest))
        return FrameResponse(_drain(answer), on_close=lambda: self._abandon(answer))

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        cancel = await read_message(request, CancelRequest)
        self._base.engine.submit(lambda engine: engine.cancel(cancel.request_id, cancel.attempt))
        for answer in list(self._answers.values()):
            if answer.job.request_id == cancel.request_id and answer.job.attempt <= cancel.attempt:
                self._fail(answer, Cancelled("the request was cancelled"))

    def busy(self) -> bool:
        return bool(self._answers or self._ships)

    def stop(self) -> None:
        for answer in list(self._answers.values()):
            self._fail(answer, Draining("the node is stopping"))
        self._link.stop()

    def on_events(self, events: Sequence[Event]) -> None:
        """News from the engine."""
        for event in events:
            if isinstance(event, Computed):
                self._sender.ship(event.transfer, event.blocks)
            elif isinstance(event, Generated):
                self._generated(event)
            elif isinstance(event, Failed):
                answer = self._answers.get(event.key)
                if answer is not None:
                    self._fail(answer, event.error)

    def granted(self, transfer: int, first_block: int) -> None:
        """Decode reserved its blocks: now the prompt may be computed."""
        answer = self._ships.get(transfer)
        if answer is not None and self._is_open(answer):
            job = answer.job
            self._base.engine.submit(
                lambda engine: engine.add(job, transfer=transfer, first_block=first_block, prefill_only=True)
            )

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Decode has everything and owns the request now."""
        self._base.shipped(stats.bytes, stats.ship_s)
        self._base.metrics.ships["done"].inc()
        self._base.metrics.ship_exposed.inc(stats.exposed_s)
        answer = self._ships.get(transfer)
        if answer is not None and self._is_open(answer):
            job = answer.job
            del self._answers[key_of(job)]
            answer.outbox.put_nowait(
                ShipDone(job.request_id, job.attempt, stats.blocks, stats.bytes, stats.ship_s, stats.exposed_s)
            )
            self._end(answer, "done")

    def failed(self, transfer: int, error: KvferryError) -> None:
        """The ship broke, or was aborted by us (the attempt has ended already then)."""
        answer = self._ships.get(transfer)
        broke = answer is not None and self._is_open(answer) and not isinstance(error, Cancelled)
        self._base.metrics.ships["failed" if broke else "aborted"].inc()
        if answer is not None:
            self._fail(answer, error)

    def quiet(self, transfer: int) -> None:
        """No send touches the ship's blocks any more."""
        self._ships.pop(transfer, None)
        self._base.engine.submit(lambda engine: engine.ship_quiet(transfer))

    def _begin(self, message: PrefillRequest) -> Answer:
        job = message.job
        if key_of(job) in self._answers:
            raise InvalidRequest(f"attempt {job.attempt} of {job.request_id} is already here", param="attempt")
        delivered = len(job.token_ids) - job.prompt_len
        if message.target is None and job.params.max_tokens - delivered > 1:
            raise InvalidRequest("a prefill without a decode target makes one token", param="max_tokens")
        answer = self._answers[key_of(job)] = Answer(job)
        if message.target is None:
            self._base.engine.submit(lambda engine: engine.add(job, prefill_only=True))
        else:
            answer.transfer = self._sender.offer(message.target, job)
            self._ships[answer.transfer] = answer
        return answer

    def _generated(self, event: Generated) -> None:
        answer = self._answers.get(event.key)
        if answer is None:
            return
        answer.outbox.put_nowait(FirstToken(event.delta, event.queue_s, event.compute_s))
        if event.handover is not None:
            self._sender.commit(event.handover, replace(event.delta, prompt_logprobs=None))
            return
        del self._answers[event.key]
        if answer.transfer is not None:
            self._sender.abort(answer.transfer, "the request ended with its first token")
        self._end(answer, "done")

    def _fail(self, answer: Answer, error: KvferryError) -> None:
        """End an attempt, unless it has ended, with an error: tell the router, the engine and the sender."""
        if not self._is_open(answer):
            return
        job = answer.job
        del self._answers[key_of(job)]
        answer.outbox.put_nowait(AttemptFailed(job.request_id, job.attempt, error.code, error.message))
        self._end(answer, "cancelled" if isinstance(error, Cancelled) else "failed")
        self._base.engine.submit(lambda engine: engine.cancel(job.request_id, job.attempt))
        if answer.transfer is not None:
            self._sender.abort(answer.transfer, error.message)

    def _is_open(self, answer: Answer) -> bool:
        """Not ended. One that repeats its key is another."""
        return self._answers.get(key_of(answer.job)) is answer

    def _end(self, answer: Answer, outcome: str) -> None:
        self._base.metrics.attempts[outcome].inc()
        answer.outbox.put_nowait(None)

    def _abandon(self, answer: Answer) -> None:
        """The response ended; if the attempt has not, the router went away."""
        self._fail(answer, Cancelled("the router closed the connection"))


class _OnLoop:
    """Passes the sender's news from the link thread to the asyncio loop, in order."""

    def __init__(self, service: PrefillService, base: Base) -> None:
        self._service = service
        self._base = base

    def granted(self, transfer: int, first_block: int) -> None:
        self._base.call_soon(lambda: self._service.granted(transfer, first_block))

    def done(self, transfer: int, stats: ShipStats) -> None:
        self._base.call_soon(lambda: self._service.done(transfer, stats))

    def failed(self, transfer: int, error: KvferryError) -> None:
        self._base.call_soon(lambda: self._service.failed(transfer, error))

    def quiet(self, transfer: int) -> None:
        self._base.call_soon(lambda: self._service.quiet(transfer))


async def _drain(answer: Answer) -> AsyncIterator[Any]:
    while (message := await answer.outbox.get()) is not None:
        yield message
