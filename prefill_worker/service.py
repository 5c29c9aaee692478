"""Prefill role of a node: takes attempts over HTTP, gets a grant of the decode node, computes, sends and commits.

States of an attempt: offered to its decode node → granted → in the engine → first token to the router, commit to the
decode node → acknowledged. Without a decode target it only passes through the engine. All state here belongs to the
asyncio loop; calls between engine and link do not run on it (`ships`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from kvferry.engine.events import Event, Failed, Generated
from kvferry.engine.request import Key, key_of
from kvferry.kv_transfer.ports import ShipStats
from kvferry.prefill_worker.ships import Ships
from kvferry.protocol.errors import Cancelled, Draining, InvalidRequest, KvferryError
from kvferry.protocol.messages import AttemptFailed, CancelRequest, FirstToken, Job, PrefillRequest, ShipDone
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate
from kvferry.runtime.tracing import TRACER, Span
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.media_routes import read_attempt
from kvferry.worker.message_stream import MessageStreamResponse
from kvferry.worker.reuse_check import audit
from kvferry.worker.service import NodeParts


@dataclass(slots=True, eq=False)
class Answer:
    """Response to one `POST /attempts/prefill`, while its attempt runs.

    `outbox` feeds the response; None ends it."""

    job: Job
    span: Span
    transfer: int | None = None
    outbox: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class PrefillService:
    """Service of a prefill node: joins HTTP, the engine and the ships.

    Implements `worker.service.Service`. endpoints: endpoints of the node, if they already exist."""

    def __init__(self, base: NodeParts, endpoints: Endpoints | None = None) -> None:
        self._base = base
        self._answers: dict[Key, Answer] = {}
        self.endpoints = endpoints or Endpoints(base)
        self._ships = Ships(base, self.endpoints, self._shipped, self._broke)
        base.app.post("/attempts/prefill")(self.post_prefill)

    async def post_prefill(self, request: Request) -> Response:
        """Begin an attempt; the response streams FirstToken, then ShipDone or AttemptFailed."""
        message = await read_attempt(request, PrefillRequest)
        self._base.require("prefill")
        answer = self._begin(message)
        return MessageStreamResponse(_drain(answer), on_close=lambda: self._abandon(answer))

    def cancel(self, cancel: CancelRequest) -> None:
        for answer in list(self._answers.values()):
            if answer.job.request_id == cancel.request_id and answer.job.attempt <= cancel.attempt:
                self._fail(answer, Cancelled("the request was cancelled"))

    def busy(self) -> bool:
        return bool(self._answers) or self._ships.busy() or self.endpoints.media.busy()

    def router_lost(self, router_id: str) -> None:
        for answer in list(self._answers.values()):
            if answer.job.router_id == router_id:
                self._fail(answer, Cancelled("the router disconnected"))

    def stop(self) -> None:
        for answer in list(self._answers.values()):
            self._fail(answer, Draining("the node is stopping"))
        self.endpoints.stop()

    def to_link(self, events: Sequence[Event]) -> None:
        self._ships.take(events)
        self.endpoints.take(events)

    def to_routers(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Generated):
                self._generated(event)
            elif isinstance(event, Failed):
                answer = self._answers.get(event.key)
                if answer is not None:
                    self._fail(answer, event.error)

    def _begin(self, message: PrefillRequest) -> Answer:
        job = message.job
        if key_of(job) in self._answers:
            raise InvalidRequest(f"attempt {job.attempt} of {job.request_id} is already running", param="attempt")
        delivered = len(job.token_ids) - job.prompt_len
        if message.target is None and not job.work.ends_on_prompt(delivered):
            raise InvalidRequest("a prefill without a decode target must have max_tokens 1", param="max_tokens")
        if message.target is not None and not isinstance(job.work, Generate):
            raise InvalidRequest("work that generates no tokens cannot have a decode target", param="target")
        span = TRACER.start("prefill", job.trace, attempt=job.attempt)
        answer = self._answers[key_of(job)] = Answer(job, span)
        if message.target is None:
            self._base.engine.submit(
                lambda engine: self.endpoints.tiers.add(engine, job, prefill_only=True), urgent=job.newcomer
            )
        else:
            answer.transfer = self._ships.offer(message.target, job)
        return answer

    def _generated(self, event: Generated) -> None:
        answer = self._answers.get(event.key)
        if answer is None:
            return
        audit(event.delta, self._base.metrics, len(answer.job.token_ids))
        answer.outbox.put_nowait(FirstToken(event.delta, event.queue_s, event.compute_s))
        reuse = event.delta.reuse or Reuse(0)
        answer.span.set_attributes(queue_s=event.queue_s, compute_s=event.compute_s)
        answer.span.set_attributes(cached_tokens=reuse.cached_len, computed_tokens=reuse.computed)
        answer.span.end()
        if event.handover is not None:
            return
        self._end(answer, "done")
        if answer.transfer is not None:
            self._ships.abandon(answer.transfer, "the request ended with its first token")

    def _shipped(self, job: Job, transfer: int, stats: ShipStats) -> None:
        answer = self._answers.get(key_of(job))
        if answer is not None and answer.transfer == transfer:
            answer.outbox.put_nowait(
                ShipDone(job.request_id, job.attempt, stats.blocks, stats.bytes, stats.ship_s, stats.exposed_s)
            )
            ship = TRACER.start("ship", job.trace, stats.ship_s, blocks=stats.blocks, bytes=stats.bytes)
            ship.set_attributes(exposed_s=stats.exposed_s)
            ship.end()
            self._end(answer, "done")

    def _broke(self, job: Job, transfer: int, error: KvferryError) -> None:
        answer = self._answers.get(key_of(job))
        if answer is not None and answer.transfer == transfer:
            self._fail(answer, error)

    def _fail(self, answer: Answer, error: KvferryError) -> None:
        """End a running attempt with an error, and notify the router, the engine and the sender."""
        job = answer.job
        if self._answers.get(key_of(job)) is not answer:
            return  # it has ended; another attempt may have its key
        answer.outbox.put_nowait(AttemptFailed(job.request_id, job.attempt, error.code, error.message))
        self._end(answer, "cancelled" if isinstance(error, Cancelled) else "failed")
        self._base.engine.cancel(job.request_id, job.attempt)
        if answer.transfer is not None:
            self._ships.abandon(answer.transfer, error.message)

    def _end(self, answer: Answer, outcome: str) -> None:
        del self._answers[key_of(answer.job)]
        answer.span.end("" if outcome == "done" else outcome)
        self._base.metrics.attempts[outcome].inc()
        answer.outbox.put_nowait(None)

    def _abandon(self, answer: Answer) -> None:
        """Cancel the attempt if it has not ended: the router closed the response."""
        self._fail(answer, Cancelled("the router closed the connection"))


async def _drain(answer: Answer) -> AsyncIterator[bytes]:
    while (message := await answer.outbox.get()) is not None:
        yield pack(message)
