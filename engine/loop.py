"""Engine thread: runs submitted commands and the engine's steps, hands out events, and audits the engine while idle.

All access to the engine goes through it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvferry.engine.audit_schedule import AuditSchedule, audit
from kvferry.engine.engine import Engine
from kvferry.engine.events import Event
from kvferry.engine.leak_detector import LeakDetector
from kvferry.engine.request_states import State

log = logging.getLogger("kvferry.engine")


class EngineLoop:
    """Owner of an engine on a thread of its own.

    `on_events` is called on that thread with each batch of events, in order; it must not block. `prepare` is the
    thread's first call. `load` is the engine's load after the last commands or the last step, whichever came later.
    `fault` says what a self-check found wrong, or what ended the thread. `on_fault` is called once with the latter, on
    the ending thread: no submitted call will run any more, so the process must end."""

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[Sequence[Event]], None],
        prepare: Callable[[], None] = lambda: None,
        on_fault: Callable[[str], None] = lambda fault: None,
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._prepare = prepare
        self._on_fault = on_fault
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._turning = False
        self._self_check = AuditSchedule(lambda: audit(engine))
        engine.stepper.suspended.called = lambda: bool(self._inbox) or self._stopping
        engine.grammars.attach(lambda call: self.submit(lambda engine: call()))
        engine.media.attach(lambda call: self.submit(lambda engine: call()))
        self._leak_detector = LeakDetector(engine)
        self.load = engine.load()
        self.fault: str | None = None
        self._turns = 0
        self.native_id: int | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and the engine's `prefault`."""
        self._thread.start()
        if self._engine.prefault:
            self._engine.prefault.start()

    def stop(self) -> None:
        """End after the current step; work in progress is left as it is."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        if self._engine.prefault:
            self._engine.prefault.stop()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Call `Engine.cancel`; the running step sees it, too, and ends early if all its attempts are cancelled.

        May be called from any thread."""
        with self._wake:
            self._engine.cancellations.announce(request_id, attempt)
            self.submit(lambda engine: engine.cancel(request_id, attempt))

    def abort_all(self, drop: Callable[[Engine], None]) -> None:
        """Run `drop`, which drops all attempts; the running step sees it, too, and ends early.

        May be called from any thread."""
        with self._wake:
            self._engine.cancellations.announce_all()
            self.submit(drop)

    def submit(self, call: Callable[[Engine], None], *, urgent: bool = False) -> None:
        """Run `call(engine)` on the engine thread before the next step. urgent: it brings a newcomer's prompt.

        May be called from any thread."""
        if urgent:
            self._engine.runner.mark_urgent()
        with self._wake:
            self._inbox.append(call)
            self._wake.notify()

    def leaked_s(self) -> float:
        """Return how long the oldest hold has outlasted its cause, in seconds, as of the previous call.

        May be called from any thread."""
        self.submit(lambda engine: self._leak_detector.check())
        return self._leak_detector.seconds

    @property
    def busy(self) -> bool:
        """Return whether anything is submitted and not handled, or in progress.

        Once false, all events were handed out. May be called from any thread."""
        with self._wake:
            return self._turning or bool(self._inbox) or self._engine.request_table.busy

    @property
    def waits_s(self) -> float:
        """Return how long the next request has lacked a seat or blocks, in seconds; 0 if none does.

        May be called from any thread."""
        refused = self._engine.scheduler.refused
        if refused is None or refused.state is not State.WAITING:
            return 0.0
        return max(0.0, time.monotonic() - refused.queued)

    @property
    def mark(self) -> int | None:
        """Return the current turn; None while the engine is idle.

        May be called from any thread, without a lock."""
        return self._turns if self._turning or self._inbox else None

    @property
    def step_tokens(self) -> int:
        """Return the tokens of the step that runs; 0 between steps. May be called from any thread, without a lock."""
        return self._engine.stepper.tokens

    def _run(self) -> None:
        self.native_id = threading.get_native_id()
        try:
            self._prepare()
            stuck = False
            while (calls := self._next_calls(stuck)) is not None:
                stuck = not self._turn(calls)
        except Exception as error:
            self.fault = f"the engine thread ended: {error}"
            log.critical(self.fault, exc_info=True)
            self._on_fault(self.fault)

    def _next_calls(self, stuck: bool) -> list[Callable[[Engine], None]] | None:
        """Wait until there is something to do, and audit the engine meanwhile; None: stop."""
        self._turning = False
        while True:
            with self._wake:
                if not self._awaited(stuck):
                    self._wake.wait(self._max_wait_s())
                if self._stopping:
                    return None
                if self._awaited(stuck):
                    calls = list(self._inbox)
                    self._inbox.clear()
                    self._engine.cancellations.forget()
                    self._turning = True
                    self._turns += 1
                    return calls
            self._check_books()
            if not self._engine.has_work():
                self._run_canary()

    def _awaited(self, stuck: bool) -> bool:
        """Return whether this thread has anything to do."""
        return self._stopping or bool(self._inbox) or (self._may_step() and not stuck)

    def _may_step(self) -> bool:
        return self._engine.has_work() and self._engine.newcomer_priority.pause_s() <= 0

    def _max_wait_s(self) -> float | None:
        """Return seconds after which to check again unless something is submitted; None: never."""
        canary = self._engine.canary
        canary_s = canary.pause_s() if canary and not self._engine.has_work() else None
        waits = (self._self_check.pause(), self._engine.newcomer_priority.pause_s() or None, canary_s)
        return min((wait for wait in waits if wait is not None), default=None)

    def _turn(self, calls: Sequence[Callable[[Engine], None]]) -> bool:
        """Run one round: inbox, outbox, step, outbox. False if nothing could run."""
        if calls:
            self._engine.stepper.collect()
        for call in calls:
            self._guarded(call)
        if self._engine.canary:
            self._engine.canary.yield_blocks()
        if calls:
            self._engine.stepper.admit_grants()
            self._engine.stepper.report_blocks()  # no step may follow, which would
            self.load = self._engine.load()
            self._flush()
        waits = self._engine.has_work() and not self._may_step()
        ran = waits or (self._engine.has_work() and self._engine.step())
        self._self_check.changed()
        self.load = self._engine.load()
        self._flush()
        if ran and not waits and not self._engine.stepper.suspended:
            self._run_canary()
        return ran

    def _run_canary(self) -> None:
        """Compute a piece of a canary check if it is time to; the piece ends when anything is submitted."""
        canary = self._engine.canary
        if canary:
            canary.turn(lambda: not (self._inbox or self._stopping))
            self.load = self._engine.load()
            self._flush()

    def _guarded(self, call: Callable[[Engine], None]) -> None:
        try:
            call(self._engine)
        except Exception:
            log.exception("engine command failed")

    def _flush(self) -> None:
        if self._engine.events:
            events = list(self._engine.events)
            self._engine.events.clear()
            self._on_events(events)

    def _check_books(self) -> None:
        """Run one short turn of the audit, without holding a lock."""
        try:
            self._self_check.turn()
        except AssertionError as error:
            self.fault = f"self-check failed: {error}"
            log.critical(self.fault, exc_info=True)
