"""Watchdog of a node: a thread that detects threads and ranks that ended or hang, and ends the process if need be."""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from kvferry.engine.loop import EngineLoop
from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.messages import Pulse
from kvferry.runtime.suspend_aware_clock import LoopClock, SuspendAwareClock, core_wait_s
from kvferry.worker.ranks import Ranks
from kvferry.worker.rates import RateMeter

log = logging.getLogger("kvferry.worker")

CHECK_S = 0.1
"""Seconds between two checks of the threads."""
ENGINE_S, LINK_S, LOOP_S, RANK_S, MEDIA_S = 15.0, 3.0, 5.0, 3.0, 300.0
"""Seconds without progress after which a thread counts as hanging.

The engine's limit is longer if its turns usually take long. The link's rounds take milliseconds. Another rank sends ten
heartbeats a second. The encoder of media may take minutes for a large image on few cores.

Time in which the watchdog itself was suspended does not count, so threads survive a suspended machine or process. For
the link, which yields to all other threads, time without a core does not count either. An engine step that waits for
cores is slow for clients, so routers are notified; but ending the process would not give it a core."""
SLOW = 10.0
"""Factor by which an engine turn may exceed the expected time of a full step.

Large steps of large models on few cores are long, and attention is slower at the end of a long prompt."""
INTERPRETER_S = 60.0
"""Seconds without progress of the Python interpreter after which a timer outside it ends the process."""
EXIT_GRACE_S = 1.5
"""Seconds that the asyncio loop has to end the node before the watchdog ends the process."""


@dataclass(slots=True)
class WatchedThread:
    """Progress of one thread.

    mark: returns a value that changes with the thread's progress; None while it is idle. still_s: seconds without
    progress, on the watchdog's clock. held_up: returns the total seconds that the thread waited for a core, excluded
    from still_s. starved: the same, for a thread whose still_s includes them; starved_s is the part without a core."""

    mark: Callable[[], Hashable]
    held_up: Callable[[], float] = float
    starved: Callable[[], float] = float
    last: Hashable = None
    since: float = 0.0
    starved_since: float = 0.0
    still_s: float = 0.0
    starved_s: float = 0.0

    def check(self, now: float) -> None:
        """Update the figures at time `now`."""
        mark, own = self.mark(), now - self.held_up()
        if mark is None or mark != self.last:
            self.last, self.since, self.starved_since = mark, own, self.starved()
        self.still_s, self.starved_s = max(0.0, own - self.since), max(0.0, self.starved() - self.starved_since)


class ThreadLiveness:
    """Progress of all threads and ranks: `fault` says why the process must end, `pulse` feeds heartbeats.

    A pulse holds the expected time of a step with the running step's tokens; `fault` uses that of a full step.

    budget: maximum tokens of a step. ranks: the other ranks, each a process. embeddings: the encoder of media. Only the
    watchdog calls `check`."""

    def __init__(
        self,
        engine: EngineLoop,
        link: UcxLink,
        loop: LoopClock,
        budget: int,
        rates: RateMeter,
        ranks: Ranks | None = None,
        embeddings: LocalEmbeddings | None = None,
    ) -> None:
        self._engine, self._link, self._budget, self._rates, self._ranks = engine, link, budget, rates, ranks
        self._clock = SuspendAwareClock()
        self._threads = {
            "engine": WatchedThread(lambda: engine.mark, starved=lambda: core_wait_s(engine.native_id)),
            "link": WatchedThread(lambda: link.heartbeat, lambda: core_wait_s(link.native_id)),
            "loop": WatchedThread(lambda: loop.ticks),
        }
        self._encoder = WatchedThread(lambda: embeddings.mark if embeddings is not None else None)
        heartbeats = ranks.heartbeats if ranks is not None else []
        self._others = [WatchedThread(lambda i=i: self._ranks.heartbeats[i]) for i, _ in enumerate(heartbeats)]  # type: ignore

    def check(self) -> None:
        """Check every thread and rank once."""
        self._clock.tick()
        for each in (*self._threads.values(), *self._others, self._encoder):
            each.check(self._clock.now())

    @property
    def pulse(self) -> Pulse:
        """Return the last observation."""
        engine, link, loop = (round(thread.still_s, 2) for thread in self._threads.values())
        return Pulse(engine, link, loop, round(self._expected_s(self._engine.step_tokens), 4))

    @property
    def fault(self) -> str | None:
        """Return the fault of a thread; None: no fault. A thread that ended comes before one that hangs."""
        if self._link.fault is not None:
            return f"the link thread ended: {self._link.fault}"
        ended = self._ranks.ended if self._ranks is not None else None
        return ended or self._engine.fault or self._hang_fault()

    @property
    def _usual_s(self) -> float:
        """Return the expected time of a full step, in seconds."""
        return self._expected_s(self._budget)

    def _expected_s(self, tokens: int) -> float:
        """Return the expected time of a step of `tokens` tokens, in seconds."""
        rates = self._rates.rates
        return max(rates.step_s, tokens / max(1.0, rates.prefill_tokens_per_s))

    def _hang_fault(self) -> str | None:
        pulse = self.pulse
        if pulse.engine_s - self._threads["engine"].starved_s > max(ENGINE_S, SLOW * self._usual_s):
            return f"a step of the engine has taken {pulse.engine_s:.0f} s"
        if pulse.link_s > LINK_S:
            return f"an iteration of the link thread has taken {pulse.link_s:.0f} s"
        if pulse.loop_s > LOOP_S:
            return f"the asyncio loop has made no progress for {pulse.loop_s:.0f} s"
        if self._encoder.still_s > MEDIA_S:
            return f"the media encoder has worked on one item for {self._encoder.still_s:.0f} s"
        for rank, other in enumerate(self._others, 1):
            if other.still_s > RANK_S:
                return f"rank {rank} has made no progress for {other.still_s:.0f} s"
        return None


class Liveness(Protocol):
    """Progress of a process's threads."""

    def check(self) -> None:
        """Check every thread once."""
        ...

    @property
    def fault(self) -> str | None:
        """Return why the process must end; None: no fault."""
        ...


class Watchdog:
    """Thread that checks the threads from `start` to `stop`.

    On a fault it calls `on_fault` once. If it is not stopped within EXIT_GRACE_S, the asyncio loop hangs too, and it
    calls `force_exit` with the fault.

    of_process: end the process, too, when the interpreter itself does not run for INTERPRETER_S."""

    def __init__(
        self,
        liveness: Liveness,
        on_fault: Callable[[], None],
        last: Callable[[str], None],
        *,
        of_process: bool,
    ) -> None:
        self._liveness, self._on_fault, self._force_exit, self._of_process = liveness, on_fault, last, of_process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread: the node is shutting down."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        checks = 0
        while not self._stop.wait(CHECK_S):
            if self._of_process and checks % 50 == 0:
                faulthandler.dump_traceback_later(INTERPRETER_S, exit=True)
            checks += 1
            self._liveness.check()
            if (fault := self._liveness.fault) is not None:
                self._on_fault()
                if not self._stop.wait(EXIT_GRACE_S):
                    self._force_exit(fault)
                break
        if self._of_process:
            faulthandler.cancel_dump_traceback_later()
