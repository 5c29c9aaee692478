"""Attempts of an adapter's decode node: run jobs on the engine and stream their output (Attempts, FramePacing)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from kvferry.engine_adapter.attempt_table import AttemptTable
from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.engine_adapter.output_sequence import OutputSequence, call_of, length_of
from kvferry.engine_adapter.pooling_work import GENERATES, PoolingWork
from kvferry.engine_adapter.transfer import Transfer
from kvferry.protocol.errors import AdapterNotLoaded, Cancelled, InvalidRequest, KvferryError
from kvferry.protocol.messages import AttemptFailed, Job, StepFrame, TokenDelta
from kvferry.protocol.work import Generate
from kvferry.worker.streams import RouterStreams

FRAME_S, FRAME_PER_STREAM_S, MAX_FRAME_S = 1e-3, 2.5e-4, 4e-3
"""Minimum time between two frames, its increase per running stream, and its maximum, in seconds.

A token waits for at most this long; that of a single stream waits for little more than a millisecond."""


def frame_interval_s(streams: int) -> float:
    """Return the minimum time between two frames for this number of running streams, in seconds."""
    return min(MAX_FRAME_S, FRAME_S + FRAME_PER_STREAM_S * streams)


class FramePacing:
    """Calls `send` soon after `due`, on the asyncio loop, at most once in a turn. streams: returns how many run.

    A frame that is due too early waits on a timer, and what comes meanwhile goes with it."""

    def __init__(
        self, send: Callable[[], None], streams: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._streams, self._clock = send, streams, clock
        self._sent_at = -MAX_FRAME_S
        self._is_due = False

    def due(self) -> None:
        """Ask for a frame. A frame that is already scheduled suffices."""
        if self._is_due:
            return
        self._is_due = True
        left = self._sent_at + frame_interval_s(self._streams()) - self._clock()
        loop = asyncio.get_running_loop()
        if left <= 0:
            loop.call_soon(self._now)  # after the sockets that are ready now
        else:
            loop.call_later(left, self._now)

    def _now(self) -> None:
        self._is_due, self._sent_at = False, self._clock()
        self._send()


@dataclass(slots=True)
class _Frame:
    """Output of one turn of the loop for one router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Running:
    """One attempt. first_at, last_at: times of its first and newest output; 0: none yet. outcome: see `Attempts`.

    transfer: of its prompt's blocks; None: this engine computes them."""

    job: Job
    began: float
    alone: bool
    transfer: Transfer | None = None
    task: asyncio.Task[None] | None = None
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    cached: int | None = None
    outcome: str = "cancelled"


class Attempts:
    """Attempts of all routers, on the asyncio loop.

    guarantees  what the engine keeps, see `protocol.lease.GUARANTEES`
    adapters    names of the engine's LoRA adapters by their ids
    pooling     work that generates nothing
    suspect     called when a call failed: it returns once the engine is known to be well, or never
    sent        called before each call to the engine
    ended       called after each attempt with its job and the engine's number of cached tokens (None: unknown)
    counted     called with the outcome of each attempt: done, cancelled or failed
    arrived     called after each attempt whose blocks came from another engine, with its call

    last_output_at: time of any call's last output, in monotonic seconds. cancel, router_lost: see `AttemptTable`."""

    def __init__(
        self,
        engine: Engine,
        streams: RouterStreams,
        guarantees: tuple[str, ...],
        adapters: Mapping[str, str],
        pooling: PoolingWork = GENERATES,
        *,
        suspect: Callable[[KvferryError], Awaitable[None]],
        sent: Callable[[Job, EngineCall], None] = lambda job, call: None,
        ended: Callable[[Job, int | None], None] = lambda job, cached: None,
        counted: Callable[[str], None] = lambda outcome: None,
        arrived: Callable[[Job, EngineCall, Transfer], None] = lambda job, call, transfer: None,
    ) -> None:
        self._engine, self._streams, self._guarantees, self._names = engine, streams, guarantees, adapters
        self._pooling = pooling
        self._sent, self._ended, self._counted, self._arrived = sent, ended, counted, arrived
        self.rates = LearnedRates()
        self._table = AttemptTable[_Running](
            suspect=lambda running, error: suspect(error), fail=self._fail, over=self._over
        )
        self.cancel, self.router_lost = self._table.cancel, self._table.router_lost
        self._outbox: defaultdict[str, _Frame] = defaultdict(_Frame)
        self._pacing = FramePacing(self._send, lambda: self.running)
        self._calls = 0
        self.last_output_at = 0.0

    @property
    def running(self) -> int:
        """Return the number of attempts that run or wait."""
        return len(self._table.running)

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens of attempts without output yet."""
        waiting = (each for each in self._table.running.values() if not each.first_at and each.transfer is None)
        return sum(len(each.job.token_ids) for each in waiting)

    def start(self, job: Job, transfer: Transfer | None = None) -> None:
        """Begin an attempt. Raises InvalidRequest, AdapterNotLoaded and Overloaded.

        An attempt that was cancelled before it came is dropped, and one that runs already is not begun twice."""
        generates = isinstance(job.work, Generate)
        (self._engine if generates else self._pooling).check(job)
        if job.media and self._engine.media is None:
            raise InvalidRequest("this model's engine takes no images, audio or video", param="messages")
        if job.adapter and job.adapter not in self._names:
            raise AdapterNotLoaded("the engine has no LoRA adapter of this id")
        self._table.require_room()
        if self._table.runs(job) or self._table.cancelled(job):
            if transfer is not None:
                transfer.fail(Cancelled("the attempt was cancelled, or runs already"))
            return
        if transfer is not None:
            job = transfer.continuing_job(job)
        running = _Running(job, time.monotonic(), not self._table.running, transfer)
        self._table.start(running, self._generate(running) if generates else self._pool(running))

    def _over(self, running: _Running) -> None:
        self._learn(running)
        self._counted(running.outcome)

    async def _pool(self, running: _Running) -> None:
        job = running.job
        delta = await self._pooling.delta(job, self._new_id(job), self._names.get(job.adapter, ""))
        self.last_output_at = time.monotonic()
        self.rates.first_token(len(job.token_ids), self.last_output_at - running.began, alone=running.alone)
        self._to_router(job).deltas.append(delta)

    def _new_id(self, job: Job) -> str:
        self._calls += 1
        return f"{job.request_id}-{job.attempt}-{self._calls}"

    async def _generate(self, running: _Running) -> None:
        job, transfer = running.job, running.transfer
        length = length_of(job, self._guarantees) if transfer is None else transfer.length
        sequence = OutputSequence(job, length)
        call = call_of(job, self._new_id(job), self._names.get(job.adapter, ""), length)
        if transfer is not None:  # the prefill node's answer has the prompt's log-probabilities
            params = replace(call.params, prompt_logprobs=None)
            call = replace(call, params=params, reference=transfer.reference)

        def deliver(delta: EngineDelta) -> None:
            self.last_output_at = running.last_at = time.monotonic()
            running.first_at = running.first_at or running.last_at
            running.tokens += len(delta.token_ids)
            nonlocal sequence
            if transfer is not None:
                begins = transfer.first_token is None
                transfer.check(delta)
                if begins:  # the prefill node sends the first token, which came with the blocks
                    sequence = OutputSequence(transfer.continuing_job(job), length)
                delta.cached_tokens = None  # the engine counts only blocks that it had before
            if delta.cached_tokens is not None:
                running.cached = delta.cached_tokens
            if (new := sequence.push(delta)) is not None:
                self._to_router(job).deltas.append(new)

        self._sent(job, call)
        await self._engine.generate(call, deliver)
        if transfer is not None:
            self._arrived(job, call, transfer)

    def _learn(self, running: _Running) -> None:
        if not running.first_at:
            return
        if running.cached is not None:
            computed = len(running.job.token_ids) - running.cached
            self.rates.first_token(computed, running.first_at - running.began, alone=running.alone)
        beside = len(self._table.running)
        self.rates.stream(running.tokens - 1, running.last_at - running.first_at, streams=1 + beside)
        self._ended(running.job, running.cached)

    def _fail(self, running: _Running, error: KvferryError, outcome: str) -> None:
        running.outcome, job = outcome, running.job
        if running.transfer is not None:
            running.transfer.fail(error)
        self._to_router(job).failed.append(AttemptFailed(job.request_id, job.attempt, error.code, error.message))

    def _to_router(self, job: Job) -> _Frame:
        """Return the frame of this turn for the job's router; it is sent when the turn ends (`FramePacing`)."""
        self._pacing.due()
        return self._outbox[job.router_id]

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, defaultdict(_Frame)
        for router_id, frame in outbox.items():
            self._streams.publish(router_id, StepFrame(tuple(frame.deltas), tuple(frame.failed)))
