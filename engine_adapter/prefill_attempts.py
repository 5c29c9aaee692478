"""Attempts of a prefill node: its engine computes prompts, and a decode node's engine fetches their blocks.

States of an attempt: in the engine, while its decode node is asked for a ticket → first token to the router, reference
to the decode node's adapter → the decode engine has the blocks. Without a decode node only the engine works on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.engine_adapter.attempt_table import AttemptTable
from kvferry.engine_adapter.engine import EngineCall, EngineDelta, Prefilled, RoomEngine, TransferEngine
from kvferry.engine_adapter.handover_sender import HandoverSender, Ticket
from kvferry.engine_adapter.output_sequence import OutputSequence, call_of, length_of
from kvferry.engine_adapter.pooling_work import GENERATES_ONLY
from kvferry.protocol.errors import AdapterNotLoaded, Cancelled, InvalidRequest, KvferryError, Overloaded
from kvferry.protocol.messages import (
    AttemptFailed,
    DecodeTarget,
    FirstToken,
    Job,
    PrefillRequest,
)
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """One attempt with the answer to its router; None ends the `outbox`. first_at: time of the first token; 0: none."""

    job: Job
    target: DecodeTarget | None
    alone: bool
    began: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    outcome: str = "cancelled"
    task: asyncio.Task[None] | None = None
    outbox: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the answer's messages."""
        while (message := await self.outbox.get()) is not None:
            yield pack(message)


class PrefillAttempts:
    """Prefills for all routers, on the asyncio loop.

    sender        hands prompts over
    suspended_s   returns how long this process has been suspended so far, in seconds
    The other parameters are those of `Attempts`."""

    def __init__(
        self,
        engine: TransferEngine | RoomEngine,
        sender: HandoverSender,
        guarantees: tuple[str, ...],
        adapters: Mapping[str, str],
        *,
        suspect: Callable[[KvferryError], Awaitable[None]],
        sent: Callable[[Job, EngineCall], None] = lambda job, call: None,
        ended: Callable[[Job, int | None], None] = lambda job, cached: None,
        counted: Callable[[str], None] = lambda outcome: None,
        suspended_s: Callable[[], float] = float,
    ) -> None:
        self._engine, self._sender = engine, sender
        self._guarantees, self._names, self._suspended_s = guarantees, adapters, suspended_s
        self._suspect, self._sent, self._ended, self._counted = suspect, sent, ended, counted
        self.rates, self.pinned = sender.rates, sender.pinned
        self.last_output_at = 0.0
        self._table = AttemptTable[PrefillAttempt](suspect=self._suspected, fail=self._fail, over=self._over)
        self.cancel, self.router_lost = self._table.cancel, self._table.router_lost
        self._calls = 0

    @property
    def running(self) -> int:
        """Return the number of attempts that have not ended."""
        return len(self._table.running)

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens of attempts without a first token."""
        return sum(len(each.job.token_ids) for each in self._table.running.values() if not each.first_at)

    def start(self, request: PrefillRequest) -> PrefillAttempt:
        """Begin an attempt and return it. Raises InvalidRequest, AdapterNotLoaded, Cancelled and Overloaded."""
        job, target = request.job, request.target
        if not isinstance(job.work, Generate):
            raise InvalidRequest(GENERATES_ONLY, param="model")
        self._engine.check(job)
        delivered = len(job.token_ids) - job.prompt_len
        if job.adapter and job.adapter not in self._names:
            raise AdapterNotLoaded("the engine has no LoRA adapter of this id")
        if target is None and not job.work.ends_on_prompt(delivered):
            raise InvalidRequest("a prefill without a decode target must have max_tokens 1", param="max_tokens")
        if self._table.runs(job):
            raise InvalidRequest(f"attempt {job.attempt} of {job.request_id} is already running", param="attempt")
        if self._table.cancelled(job):
            raise Cancelled("the attempt was cancelled")
        self._table.require_room()
        if job.media and self._engine.media is None:
            raise InvalidRequest("this model's engine takes no images, audio or video", param="messages")
        if target is not None and (job.media or not self._repeats(job)):
            raise Overloaded("only the decode node takes prompts with media, and jobs whose tokens are not repeatable")
        attempt = PrefillAttempt(job, target, alone=not self._table.running)
        self._table.start(attempt, self._compute(attempt))
        return attempt

    def abandon(self, attempt: PrefillAttempt) -> None:
        """Cancel an attempt if it has not ended."""
        if attempt.task is not None:
            attempt.task.cancel()

    def _repeats(self, job: Job) -> bool:
        """Return whether the decode engine draws the first token again."""
        return ("greedy_replay" if job.params.temperature == 0 else "seeded_replay") in self._guarantees

    async def _suspected(self, attempt: PrefillAttempt, error: KvferryError) -> None:
        """Suspect the engine, unless it has computed the prompt."""
        if not attempt.first_at:
            await self._suspect(error)

    def _new_id(self, job: Job) -> str:
        self._calls += 1
        return f"{job.request_id}-{job.attempt}-{self._calls}"

    async def _compute(self, attempt: PrefillAttempt) -> None:
        job, target = attempt.job, attempt.target
        length = length_of(job, self._guarantees)
        call = call_of(job, self._new_id(job), self._names.get(job.adapter, ""), length)
        self._sent(job, call)
        if target is None:
            sequence, deltas = OutputSequence(job, length), list[EngineDelta]()
            await self._engine.generate(call, deltas.append)
            self._first(attempt, sequence, joined(deltas))
            return
        offering = asyncio.create_task(self._sender.offer(job, target))
        assert not isinstance(self._engine, RoomEngine)
        computing = asyncio.create_task(self._engine.prefill(call))
        try:
            await self._hand_over(attempt, target, call, computing, offering)
        finally:
            offering.cancel()
            computing.cancel()
            await asyncio.gather(offering, computing, return_exceptions=True)

    async def _hand_over(
        self,
        attempt: PrefillAttempt,
        target: DecodeTarget,
        call: EngineCall,
        computing: asyncio.Task[Prefilled],
        offering: asyncio.Task[Ticket],
    ) -> None:
        job, length, suspended_s = attempt.job, len(call.token_ids), self._suspended_s()
        await asyncio.wait({computing, offering}, return_when=asyncio.FIRST_COMPLETED)
        if offering.done():
            offering.result()  # if it is refused the prompt need not be computed
        prefilled = await computing
        delta = prefilled.delta
        kept = self._sender.keep(length, delta.token_ids[0], prefilled.reference, self._suspended_s() - suspended_s)
        if delta.finish_reason == "length" and not job.work.ends_on_prompt(length - job.prompt_len):
            delta = replace(delta, finish_reason=None)
        self._first(attempt, OutputSequence(job, length), delta)
        if delta.finish_reason is None:
            attempt.outbox.put_nowait(await self._sender.send(job, target, kept, await offering))

    def _first(self, attempt: PrefillAttempt, sequence: OutputSequence, delta: EngineDelta) -> None:
        """Send the router the first token, unless it was delivered before, and learn from its time."""
        job, cached = attempt.job, delta.cached_tokens
        attempt.first_at = self.last_output_at = time.monotonic()
        compute_s = attempt.first_at - attempt.began
        if (new := sequence.push(delta)) is not None:
            if new.reuse is not None:
                new.reuse = Reuse(new.reuse.prompt_len, reused_prefill=new.reuse.reused_decode,
                                   computed=new.reuse.computed)  # fmt: skip
            attempt.outbox.put_nowait(FirstToken(new, 0.0, compute_s))
        if cached is not None:
            self.rates.first_token(len(job.token_ids) - cached, compute_s, alone=attempt.alone)
        self._ended(job, cached)

    def _fail(self, attempt: PrefillAttempt, error: KvferryError, outcome: str) -> None:
        attempt.outcome, job = outcome, attempt.job
        attempt.outbox.put_nowait(AttemptFailed(job.request_id, job.attempt, error.code, error.message))

    def _over(self, attempt: PrefillAttempt) -> None:
        self._counted(attempt.outcome)
        attempt.outbox.put_nowait(None)


def joined(deltas: Sequence[EngineDelta]) -> EngineDelta:
    """Return a whole output as one delta."""
    first, last = deltas[0], deltas[-1]
    logprobs = None if first.logprobs is None else tuple(row for each in deltas for row in each.logprobs or ())
    tokens = tuple(token for each in deltas for token in each.token_ids)
    return EngineDelta(tokens, logprobs, last.finish_reason, last.cached_tokens, first.prompt_logprobs)
