"""Attempts that run on the engine, from a router's message to the last frame on its token stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.engine_adapter.output_sequence import OutputSequence, call_of, length_of
from kvferry.engine_adapter.transfer import Transfer
from kvferry.protocol.errors import (
    AdapterNotLoaded,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    NodeLost,
    Overloaded,
    StepFailed,
)
from kvferry.protocol.messages import AttemptFailed, CancelRequest, Job, StepFrame, TokenDelta
from kvferry.worker.streams import RouterStreams

log = logging.getLogger("kvferry.adapter")

MAX_ATTEMPTS = 4096
"""Most attempts that run or wait at once; the engine queues what it cannot run."""
MAX_CANCELS = 4096
"""Most cancellations that are remembered for attempts which come after them."""


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
    suspect     called when a call failed: it returns once the engine is known to be well, or never
    sent        called before each call to the engine
    ended       called after each attempt with its job and the engine's account of cached tokens (None: unknown)
    counted     called with the outcome of each attempt: done, cancelled or failed
    arrived     called after each attempt whose blocks came from another engine, with its call

    heard_at: when output of any call came last, in monotonic seconds."""

    def __init__(
        self,
        engine: Engine,
        streams: RouterStreams,
        guarantees: tuple[str, ...],
        adapters: Mapping[str, str],
        *,
        suspect: Callable[[KvferryError], Awaitable[None]],
        sent: Callable[[Job, EngineCall], None] = lambda job, call: None,
        ended: Callable[[Job, int | None], None] = lambda job, cached: None,
        counted: Callable[[str], None] = lambda outcome: None,
        arrived: Callable[[Job, EngineCall, Transfer], None] = lambda job, call, transfer: None,
    ) -> None:
        self._engine, self._streams, self._guarantees, self._names = engine, streams, guarantees, adapters
        self._suspect, self._sent, self._ended, self._counted = suspect, sent, ended, counted
        self._arrived = arrived
        self.rates = LearnedRates()
        self._running: dict[tuple[str, int], _Running] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._outbox: defaultdict[str, _Frame] = defaultdict(_Frame)
        self._calls = 0
        self.heard_at = 0.0

    @property
    def running(self) -> int:
        """Return the number of attempts that run or wait."""
        return len(self._running)

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens of attempts without output yet."""
        waiting = (each for each in self._running.values() if not each.first_at and each.transfer is None)
        return sum(len(each.job.token_ids) for each in waiting)

    def start(self, job: Job, transfer: Transfer | None = None) -> None:
        """Begin an attempt. Raises InvalidRequest, AdapterNotLoaded and Overloaded.

        An attempt that was cancelled before it came is dropped, and one that runs already is not begun twice."""
        self._engine.check(job)
        if job.media and self._engine.media is None:
            raise InvalidRequest("this model's engine takes no images, audio or video", param="messages")
        if job.adapter and job.adapter not in self._names:
            raise AdapterNotLoaded("the engine has no LoRA adapter of this id")
        if len(self._running) >= MAX_ATTEMPTS:
            raise Overloaded(f"{MAX_ATTEMPTS} attempts run or wait on this node", retry_after=1.0)
        key = (job.request_id, job.attempt)
        if key in self._running or self._cancelled.get(job.request_id, -1) >= job.attempt:
            if transfer is not None:
                transfer.fail(Cancelled("the attempt was cancelled, or runs already"))
            return
        if transfer is not None:
            job = transfer.job_behind(job)
        running = self._running[key] = _Running(job, time.monotonic(), not self._running, transfer)
        running.task = asyncio.create_task(self._run(running))
        running.task.add_done_callback(lambda task: self._over(key, running, task))

    def cancel(self, cancel: CancelRequest) -> None:
        """Drop all attempts of a request up to the given one, also those that come later."""
        self._cancelled[cancel.request_id] = cancel.attempt
        while len(self._cancelled) > MAX_CANCELS:
            self._cancelled.popitem(last=False)
        self._drop(lambda job: job.request_id == cancel.request_id and job.attempt <= cancel.attempt)

    def router_lost(self, router_id: str) -> None:
        """Drop everything that runs for a router."""
        self._drop(lambda job: job.router_id == router_id)

    def _drop(self, chosen: Callable[[Job], bool]) -> None:
        for running in [each for each in self._running.values() if chosen(each.job)]:
            if running.task is not None:
                running.task.cancel()

    async def _run(self, running: _Running) -> None:
        job = running.job
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s)):
                await self._generate(running)
            running.outcome = "done"
        except TimeoutError:
            self._fail(running, DeadlineExceeded(f"not finished after {job.deadline_s:.3g} s"))
        except KvferryError as error:
            running.outcome = "failed"
            if isinstance(error, NodeLost | StepFailed):
                await self._suspect(error)
            self._fail(running, error)
        except Exception as error:
            log.exception("attempt %d of %s", job.attempt, job.request_id)
            self._fail(running, KvferryError(f"the adapter failed: {type(error).__name__}"))

    def _over(self, key: tuple[str, int], running: _Running, task: asyncio.Task[None]) -> None:
        """Forget the attempt. A task that is cancelled before its first step runs no line of `_run`."""
        del self._running[key]
        if task.cancelled():
            self._fail(running, Cancelled("the attempt was cancelled"), "cancelled")
        self._learn(running)
        self._counted(running.outcome)

    async def _generate(self, running: _Running) -> None:
        job, transfer = running.job, running.transfer
        length = length_of(job, self._guarantees) if transfer is None else transfer.length
        sequence = OutputSequence(job, length)
        self._calls += 1
        call = call_of(job, f"{job.request_id}-{job.attempt}-{self._calls}", self._names.get(job.adapter, ""), length)
        if transfer is not None:  # the prefill node's answer has the prompt's log-probabilities
            params = replace(call.params, prompt_logprobs=None)
            call = replace(call, params=params, reference=transfer.reference)

        def deliver(delta: EngineDelta) -> None:
            self.heard_at = running.last_at = time.monotonic()
            running.first_at = running.first_at or running.last_at
            running.tokens += len(delta.token_ids)
            if transfer is not None:
                transfer.see(delta)
                delta.cached_tokens = None  # the engine counts only blocks that it had before
            if delta.cached_tokens is not None:
                running.cached = delta.cached_tokens
            if (told := sequence.push(delta)) is not None:
                self._to_router(job).deltas.append(told)

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
        self.rates.stream(running.tokens - 1, running.last_at - running.first_at)
        self._ended(running.job, running.cached)

    def _fail(self, running: _Running, error: KvferryError, outcome: str = "failed") -> None:
        running.outcome, job = outcome, running.job
        if running.transfer is not None:
            running.transfer.fail(error)
        self._to_router(job).failed.append(AttemptFailed(job.request_id, job.attempt, error.code, error.message))

    def _to_router(self, job: Job) -> _Frame:
        """Return the frame of this turn for the job's router; it is sent when the turn ends."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        return self._outbox[job.router_id]

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, defaultdict(_Frame)
        for router_id, frame in outbox.items():
            self._streams.publish(router_id, StepFrame(tuple(frame.deltas), tuple(frame.failed)))
