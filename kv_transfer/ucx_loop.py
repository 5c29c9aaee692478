"""The thread that owns UCX's context and worker: runs commands and timers, progresses UCX, sleeps when nothing is due.

Without work for SPIN_S it arms the worker and waits on the worker's descriptor, an eventfd and the next timer. Spinning
that long keeps latency low in a burst; sleeping keeps an idle process below 1 % of a core. A fruitless round yields the
core: two ends that spin on one core, each waiting for the other, would hand it over once a time slice (0.2 GB/s).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kv_transfer.ucx_library import UcxLibrary

log = logging.getLogger(__name__)
SPIN_S = 60e-6
PROGRESS_BURST = 32
MAX_SLEEP_S = 1.0
CLOSING_ROUNDS = 100


class UcxLoop:
    """opened(worker) runs on the thread before start returns, poll(progressed) after every round (progressed: requests
    may have completed; it returns whether it found work), closing() last. An exception in a round ends the thread:
    nothing that was posted will complete, so `fault` says why and on_fault(text) runs once, on the dying thread."""

    def __init__(
        self,
        library: UcxLibrary,
        options: dict[str, str],
        prepare: Callable[[], None] | None,
        opened: Callable[[Any], None],
        poll: Callable[[bool], bool],
        closing: Callable[[], None],
        on_fault: Callable[[str], None],
    ):
        self._library, self._options, self._prepare = library, options, prepare
        self._opened, self._poll, self._closing, self._on_fault = opened, poll, closing, on_fault
        self.fault: str | None = None
        self.heartbeat = time.monotonic()
        self._commands: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._sleeping = self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; raises what opening raised."""
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kv-link", daemon=True)
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """Close and join. Commands submitted later never run."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake()
        self._thread.join()
        self._thread = None
        os.close(self._eventfd)

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the thread soon; from any thread."""
        self._commands.append(call)
        if self._sleeping:
            self._wake()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call` after a delay; on the link thread only."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._serial), call))

    def _wake(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    def _run(self, started: Future[None]) -> None:
        try:
            worker = self._open()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._rounds(worker)
            self._close()
        except Exception as error:
            log.exception("the link thread ends")
            self.fault = f"{type(error).__name__}: {error}"
            self._on_fault(self.fault)
        finally:
            self._epoll.close()

    def _close(self) -> None:
        self._closing()
        for _ in range(CLOSING_ROUNDS):
            if not self._run_due():
                break

    def _open(self) -> Any:
        if self._prepare is not None:
            self._prepare()
        api = self._library.api
        context = api.UCXContext(self._options, (api.Feature.TAG, api.Feature.AM, api.Feature.WAKEUP))
        worker = api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
        self._epoll = select.epoll()
        self._epoll.register(worker.epoll_file_descriptor, select.EPOLLIN)
        self._epoll.register(self._eventfd, select.EPOLLIN)
        self._opened(worker)
        return worker

    def _rounds(self, worker: Any) -> None:
        worked_at = time.monotonic()
        while not self._stopping:
            self.heartbeat = time.monotonic()
            ran = self._run_due()
            progressed = self._progress(worker)
            if self._poll(ran or progressed) or ran or progressed:
                worked_at = time.monotonic()
                continue
            if time.monotonic() - worked_at > SPIN_S:
                self._sleep(worker)
            os.sched_yield()

    def _progress(self, worker: Any) -> bool:
        for count in range(PROGRESS_BURST):
            if not worker.progress_once():
                return count > 0
        return True

    def _run_due(self) -> bool:
        """Run the commands queued so far and the timers that are due; whether there were any."""
        ran = False
        for _ in range(len(self._commands)):
            self._call(self._commands.popleft())
            ran = True
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._call(heapq.heappop(self._timers)[2])
            ran = True
        return ran

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a command of the link failed")

    def _sleep(self, worker: Any) -> None:
        self._sleeping = True
        if not self._commands and not self._stopping and worker.arm():
            due = self._timers[0][0] - time.monotonic() if self._timers else MAX_SLEEP_S
            for descriptor, _ in self._epoll.poll(max(0.0, min(due, MAX_SLEEP_S))):
                if descriptor == self._eventfd:
                    os.eventfd_read(self._eventfd)
        self._sleeping = False
