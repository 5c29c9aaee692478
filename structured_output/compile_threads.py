"""CompileThreads: thread pool for grammar compilation and masks, in which slow jobs continue at low priority.

Meanwhile another thread takes the next jobs, so that no job waits behind a hostile grammar. Under a flood of short
jobs the threads run at low priority, too."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.protocol.errors import Overloaded

log = logging.getLogger("kvferry.structured_output")

Job = Callable[[], None]
PATIENCE_S = 0.02
"""Time after which a job counts as slow, in seconds."""
CREDIT_S = 0.5
"""Time that short jobs may take after a pause beyond their share, in seconds."""
STEPS = 10
"""Niceness added to a low-priority thread, in steps: on a contended core it gets a tenth of the time."""
_ASLEEP_AFTER = 50
"""Checks of an idle pool after which the watch thread sleeps."""


@dataclass(slots=True, eq=False)
class _Worker:
    native_id: int = 0
    began: float | None = None
    slow: bool = False
    spent: bool = False
    """True once the thread runs at low priority because the pool has used its share."""


class CompileThreads:
    """Thread pool that runs at most `threads` jobs at once, beside `slow` slow ones; at most `bound` wait.

    Jobs must not raise. They start in the order of submission. The threads are daemons and start when needed.
    share: share of one core for jobs at normal priority."""

    def __init__(
        self, name: str, threads: int = 1, *, slow: int = 4, bound: int = 4096, share: float = math.inf
    ) -> None:
        self._name, self._threads, self._slow, self._bound = name, threads, slow, bound
        self._changed = threading.Condition()
        self._awake = threading.Event()
        self._jobs: deque[Job] = deque()
        self._workers: set[_Worker] = set()
        self._watching = False
        self._share, self._free_at = share, 0.0

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs. Raises Overloaded if too many wait. May be called from any thread."""
        with self._changed:
            if len(self._jobs) + len(jobs) > self._bound:
                raise Overloaded(
                    f"{len(self._jobs)} grammars are already waiting; the limit is {self._bound}", retry_after=1
                )
            self._jobs.extend(jobs)
            self._staff()
            self._changed.notify(len(jobs))
        self._awake.set()

    def _staff(self) -> None:
        """Start threads until there are enough. Each slow thread gets a replacement, up to the limit."""
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()
        slow = sum(worker.slow for worker in self._workers)
        while len(self._workers) < self._threads + min(slow, self._slow):
            worker = _Worker()
            self._workers.add(worker)
            threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True).start()

    def _work(self, worker: _Worker) -> None:
        worker.native_id = threading.get_native_id()
        while True:
            with self._changed:
                while not self._jobs:
                    self._changed.wait()
                began = time.monotonic()
                if worker.spent and began >= self._free_at:
                    self._leave(worker)
                    return
                job = self._jobs.popleft()
                worker.began = began
            if not worker.spent and began < self._free_at:
                worker.spent = True
                _give_way(worker.native_id)
            try:
                job()
            except Exception:
                log.exception("a grammar compilation or mask failed")
            with self._changed:
                worker.began = None
                if not worker.spent:
                    self._charge(began)
                if worker.slow:
                    self._leave(worker)
                    return

    def _leave(self, worker: _Worker) -> None:
        """Remove a low-priority thread from the pool.

        It cannot raise its priority again, and threads that it starts inherit it: the watch thread starts the next."""
        self._workers.discard(worker)
        self._awake.set()

    def _charge(self, began: float) -> None:
        """Charge the pool's share with a job at normal priority: until now, or until it was found to be slow."""
        now = time.monotonic()
        credit_from = max(self._free_at, now - CREDIT_S / self._share)
        self._free_at = credit_from + min(now - began, 2 * PATIENCE_S) / self._share

    def _watch(self) -> None:
        """Find slow threads. Checks while jobs run; sleeps once the pool has been idle for a while."""
        quiet = 0
        while True:
            if quiet > _ASLEEP_AFTER:
                self._awake.clear()
                self._awake.wait()
                quiet = 0
            time.sleep(PATIENCE_S)
            with self._changed:
                overdue = time.monotonic() - PATIENCE_S
                late = [w for w in self._workers if not w.slow and w.began is not None and w.began < overdue]
                for worker in late:
                    worker.slow = True
                    _put_behind(worker.native_id)
                self._staff()
                busy = bool(self._jobs) or any(w.began is not None and not w.slow for w in self._workers)
            quiet = 0 if busy else quiet + 1


class Inline:
    """Runs each job at once on the caller's thread: for tests, and where no other job waits."""

    def submit(self, *jobs: Job) -> None:
        """Run the jobs in order."""
        for job in jobs:
            job()


Runs = CompileThreads | Inline


def run_all(jobs: Sequence[Job], pool: Runs) -> None:
    """Submit the jobs, if there are any."""
    if jobs:
        pool.submit(*jobs)


def _give_way(native_id: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, native_id, os.getpriority(os.PRIO_PROCESS, native_id) + STEPS)
    except OSError as error:
        log.debug("the thread of a large grammar keeps its priority: %s", error)


def _put_behind(native_id: int) -> None:
    """Let the thread run only while its core is idle otherwise."""
    try:
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(native_id, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, native_id, 19)
    except OSError as error:
        log.debug("the thread of a slow grammar keeps its priority: %s", error)
