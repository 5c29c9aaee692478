"""Table of the attempts that run on an adapter, and of cancellations that arrived before their attempts."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, Protocol, TypeVar

from kvferry.protocol.errors import Cancelled, DeadlineExceeded, KvferryError, NodeLost, Overloaded, StepFailed
from kvferry.protocol.messages import CancelRequest, Job

log = logging.getLogger("kvferry.adapter")

MAX_ATTEMPTS = 4096
"""Maximum number of attempts that run or wait; the engine queues what it cannot run."""
MAX_CANCELS = 4096
"""Maximum number of cancellations kept for attempts that have not arrived yet."""


class RunningAttempt(Protocol):
    """An attempt that runs. outcome: done, cancelled or failed, once it has ended."""

    job: Job
    task: asyncio.Task[None] | None
    outcome: str


Attempt = TypeVar("Attempt", bound=RunningAttempt)


class AttemptTable(Generic[Attempt]):
    """Attempts by request and number, on the asyncio loop.

    suspect  called with an attempt and an error that the engine may have caused: it returns once the engine is
             known to be well, or never
    fail     called when an attempt fails, with its error and outcome
    over     called after each attempt"""

    def __init__(
        self,
        *,
        suspect: Callable[[Attempt, KvferryError], Awaitable[None]],
        fail: Callable[[Attempt, KvferryError, str], None],
        over: Callable[[Attempt], None],
    ) -> None:
        self._suspect, self._fail, self._over = suspect, fail, over
        self.running: dict[tuple[str, int], Attempt] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()

    def runs(self, job: Job) -> bool:
        """Return whether this attempt has begun and not ended."""
        return (job.request_id, job.attempt) in self.running

    def cancelled(self, job: Job) -> bool:
        """Return whether this attempt was cancelled before it came."""
        return self._cancelled.get(job.request_id, -1) >= job.attempt

    def require_room(self) -> None:
        """Raise Overloaded if no more attempts can begin."""
        if len(self.running) >= MAX_ATTEMPTS:
            raise Overloaded(f"{MAX_ATTEMPTS} attempts run or wait on this node", retry_after=1.0)

    def start(self, attempt: Attempt, work: Coroutine[None, None, None]) -> None:
        """Begin an attempt, whose work ends at the job's deadline."""
        self.running[attempt.job.request_id, attempt.job.attempt] = attempt
        attempt.task = asyncio.create_task(self._run(attempt, work))
        attempt.task.add_done_callback(lambda task: self._ended(attempt, work, task))

    def cancel(self, cancel: CancelRequest) -> None:
        """Drop all attempts of a request up to the given one, including those that arrive later."""
        self._cancelled[cancel.request_id] = cancel.attempt
        while len(self._cancelled) > MAX_CANCELS:
            self._cancelled.popitem(last=False)
        self._drop(lambda job: job.request_id == cancel.request_id and job.attempt <= cancel.attempt)

    def router_lost(self, router_id: str) -> None:
        """Drop all attempts of a router."""
        self._drop(lambda job: job.router_id == router_id)

    def _drop(self, chosen: Callable[[Job], bool]) -> None:
        for attempt in [each for each in self.running.values() if chosen(each.job)]:
            if attempt.task is not None:
                attempt.task.cancel()

    async def _run(self, attempt: Attempt, work: Coroutine[None, None, None]) -> None:
        job = attempt.job
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s)):
                await work
            attempt.outcome = "done"
        except TimeoutError:
            self._fail(attempt, DeadlineExceeded(f"not finished after {job.deadline_s:.3g} s"), "failed")
        except KvferryError as error:
            if isinstance(error, NodeLost | StepFailed):
                await self._suspect(attempt, error)
            self._fail(attempt, error, "failed")
        except Exception as error:
            log.exception("attempt %d of %s failed", job.attempt, job.request_id)
            self._fail(attempt, KvferryError(f"the adapter failed: {type(error).__name__}"), "failed")

    def _ended(self, attempt: Attempt, work: Coroutine[None, None, None], task: asyncio.Task[None]) -> None:
        """Forget the attempt. A task that is cancelled before its first step runs no line of `_run`."""
        work.close()
        del self.running[attempt.job.request_id, attempt.job.attempt]
        if task.cancelled():
            self._fail(attempt, Cancelled("the attempt was cancelled"), "cancelled")
        self._over(attempt)
