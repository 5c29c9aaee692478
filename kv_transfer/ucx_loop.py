"""Event loop of a link, on the one thread that owns its UCX context, workers and sockets.

It runs commands and timers, progresses active workers, polls sockets, and sleeps when nothing is due.

A worker without work for SPIN_S is armed. Once all are armed, the thread sleeps until a descriptor, the eventfd or
a timer is due. Spinning keeps latency low in a burst; sleeping keeps an idle process below 1 % of a core. A round
without work yields the core: two ends that spin on one core and wait for each other would otherwise switch only once a
time slice (0.2 GB/s)."""

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

from kvferry.kv_transfer.ucx_abandoned_connections import AbandonedConnections
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.kv_transfer.ucx_worker import SPIN_S, UcxWorker
from kvferry.kv_transfer.wakeup import Wakeup
from kvferry.runtime.limits import allow_descriptors

log = logging.getLogger(__name__)
MAX_SLEEP_S = 1.0
SOCKETS_EVERY_S = 0.5e-3
"""Seconds between polls of the sockets while blocks move; each poll releases the GIL."""
CLOSING_ROUNDS = 100
"""Maximum number of rounds of remaining commands that run when the thread ends."""
STOP_S = 10.0
"""Maximum time to wait for the thread to end, in seconds. A node must end within 15 s after its drain."""
READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
EventCallback = Callable[[int], bool]
"""Callback with the events of a descriptor; returns whether it did any work."""


class UcxLoop:
    """Event loop of a link, on its own thread.

    opened() runs on the thread before `start` returns, closing() last. Workers and descriptor callbacks handle their
    own exceptions. Any other exception ends the thread, and nothing that was posted will complete. Then `fault` holds
    the error, and on_fault(text) runs once, on the dying thread."""

    def __init__(
        self,
        library: UcxLibrary,
        options: dict[str, str],
        prepare: Callable[[], None] | None,
        opened: Callable[[], None],
        closing: Callable[[], None],
        on_fault: Callable[[str], None],
    ):
        self._library, self._options, self._prepare = library, options, prepare
        self._opened, self._closing, self._on_fault = opened, closing, on_fault
        self.fault: str | None = None
        self.heartbeat = time.monotonic()
        self._commands: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._watched: dict[int, EventCallback] = {}
        self._workers: set[UcxWorker] = set()
        self._active: dict[UcxWorker, None] = {}
        self._abandoned = AbandonedConnections(options["TLS"])
        self._polled_at = 0.0
        self._sleeping = self._stopping = False
        self._thread: threading.Thread | None = None
        self.native_id: int | None = None

    def start(self) -> None:
        """Start the thread. Raises any error of opening."""
        allow_descriptors()
        self._wakeup = Wakeup()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kv-link", daemon=True)
        self._thread.start()
        started.result()
        self.native_id = self._thread.native_id

    def stop(self) -> None:
        """Close and join the thread. Commands submitted later never run. Waits at most STOP_S."""
        if self._thread is None:
            return
        self._stopping = True
        self._wakeup.wake()
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._wakeup.close()
        self._thread = None

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the thread soon. Thread-safe."""
        self._commands.append(call)
        if self._sleeping:
            self._wakeup.wake()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call` after a delay. Call it on the link thread only."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._serial), call))

    # Descriptors and workers: call these on the link thread only.

    def watch(self, descriptor: int, events: int, callback: EventCallback) -> None:
        """Call `callback` for these events until `unwatch`; replaces events and callback of a watched descriptor."""
        known = descriptor in self._watched
        self._watched[descriptor] = callback
        (self._epoll.modify if known else self._epoll.register)(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call it before the descriptor is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def open_worker(self, poll: Callable[[bool], bool], broken: Callable[[Exception], None]) -> UcxWorker:
        """Return a new, active worker. poll, broken: see UcxWorker. Raises TransferFailed."""
        worker = UcxWorker(self._library, self._context, poll, broken)
        self._workers.add(worker)
        self._active[worker] = None
        self.watch(worker.descriptor, READABLE, lambda events: self.activate(worker))
        return worker

    def activate(self, worker: UcxWorker) -> bool:
        """Progress the worker until it is idle again: something was posted, or UCX has something to do."""
        if worker not in self._active and worker in self._workers:
            self._active[worker] = None
            worker.touch()
        return False

    def close_worker(self, worker: UcxWorker, ended: Callable[[], bool]) -> None:
        """Close a worker; its memory is quiet on return, or the thread ends before any other command runs.

        ended: see UcxWorker.close."""
        self._active.pop(worker, None)
        if worker in self._workers:
            self._workers.remove(worker)
            self.unwatch(worker.descriptor)
            if not worker.close(ended):
                self._abandoned.add()

    def _run(self, started: Future[None]) -> None:
        self._epoll = select.epoll()
        self.watch(self._wakeup.descriptor, READABLE, self._wakeup.reset)
        try:
            self._open()
        except Exception as error:
            self._epoll.close()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._rounds()
            self._close()
        except Exception as error:
            log.exception("the link thread ends with an error")
            self.fault = f"{type(error).__name__}: {error}"
            self._on_fault(self.fault)
        finally:
            self._epoll.close()

    def _open(self) -> None:
        if self._prepare is not None:
            self._prepare()
        api = self._library.api
        self._context = api.UCXContext(self._options, (api.Feature.TAG, api.Feature.WAKEUP))
        self._opened()

    def _close(self) -> None:
        self._closing()
        for _ in range(CLOSING_ROUNDS):
            if not self._run_due():
                break
        self._context = None

    def _rounds(self) -> None:
        last_work_at = time.monotonic()
        while not self._stopping:
            now = self.heartbeat = time.monotonic()
            worked = self._run_due() | self._progress()
            if not worked or now - self._polled_at > SOCKETS_EVERY_S:
                worked |= self._run_callbacks(0.0)
                self._arm_idle()
            if worked:
                last_work_at = now
            elif not self._active and now - last_work_at > SPIN_S:
                self._sleep()
            else:
                os.sched_yield()

    def _progress(self) -> bool:
        worked = False
        for worker in tuple(self._active):
            if worker in self._active:
                worked |= worker.round()
        return worked

    def _arm_idle(self) -> None:
        """Arm the workers that had no work for SPIN_S, so that their descriptors wake the thread."""
        for worker in tuple(self._active):
            if worker.arm_if_idle():
                del self._active[worker]

    def _run_callbacks(self, timeout: float) -> bool:
        """Run the callbacks of ready descriptors; return whether one did any work."""
        worked = False
        self._polled_at = time.monotonic()
        for descriptor, events in self._epoll.poll(timeout):
            callback = self._watched.get(descriptor)
            worked |= callback is not None and callback(events)
        return worked

    def _sleep(self) -> None:
        self._sleeping = True
        if not self._commands and not self._stopping:
            due = self._timers[0][0] - time.monotonic() if self._timers else MAX_SLEEP_S
            self._run_callbacks(max(0.0, min(due, MAX_SLEEP_S)))
        self._sleeping = False

    def _run_due(self) -> bool:
        """Run the queued commands and the timers that are due; return whether any ran."""
        ran = False
        for _ in range(len(self._commands)):
            if not self._stopping:
                self._abandoned.check()
            self._call(self._commands.popleft())
            ran = True
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._call(heapq.heappop(self._timers)[2])
            ran = True
        return ran

    def _call(self, call: Callable[[], None]) -> None:
        """Run a command, and log its errors. Each command updates the heartbeat, since a round may run many."""
        self.heartbeat = time.monotonic()
        try:
            call()
        except Exception:
            log.exception("a command of the link failed")
