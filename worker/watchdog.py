"""Watchdog of a node's threads: detects those that died or hang."""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvferry.engine.loop import EngineLoop
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.messages import Pulse
from kvferry.runtime.suspend_aware_clock import LoopClock, SuspendAwareClock, held_up_s
from kvferry.worker.ranks import Ranks
from kvferry.worker.rates import RateMeter

log = logging.getLogger("kvferry.worker")

LOOK_S = 0.1
"""Between two looks at the threads."""
ENGINE_S, LINK_S, LOOP_S, RANK_S = 15.0, 3.0, 5.0, 3.0
"""A thread that makes no move for so long does not come back: of the engine, unless its turns are long as a rule; of
the link, whose rounds take milliseconds; of the asyncio loop; of another rank, which gives ten signs a second. The
watcher counts only time in which it was itself awake, so a machine or a process that stands still for a moment finds
its threads alive; nor, of the link, which gives way to all others, time in which it had no core. A step that waits for
cores is long for its clients, so routers hear of it; to end the process would not give it any."""
SLOW = 10.0
"""A turn may take this many times what its tokens should, at the learned rate: large steps of large models on few cores
are long, and their attention is longer at the end of a long prompt."""
INTERPRETER_S = 60.0
"""After so long without any Python the process ends, by a timer that needs no interpreter."""
LAST_S = 1.5
"""What ending in order may take the asyncio loop, before the watcher ends the process."""


@dataclass(slots=True)
class Watched:
    """One thread. `mark` changes whenever it moves and is None while it has nothing to do; `still_s` is how long it has
    not moved, in seconds of the watcher in which it had a core: `held_up` is how long it waited for one, ever. Of one
    whose `starved` tells that instead, all time counts, and `starved_s` is how much of it passed without a core."""

    mark: Callable[[], Hashable]
    held_up: Callable[[], float] = float
    starved: Callable[[], float] = float
    last: Hashable = None
    since: float = 0.0
    starved_since: float = 0.0
    still_s: float = 0.0
    starved_s: float = 0.0

    def look(self, now: float) -> None:
        mark, own = self.mark(), now - self.held_up()
        if mark is None or mark != self.last:
            self.last, self.since, self.starved_since = mark, own, self.starved()
        self.still_s, self.starved_s = max(0.0, own - self.since), max(0.0, self.starved() - self.starved_since)


class ThreadVitals:
    """`fault` says why the process must be ended, if it must, `pulse` how its threads move.

    budget: most tokens of a step; ranks: the others that compute the model, each with a process. `look` is the
    watcher's."""

    def __init__(
        self,
        engine: EngineLoop,
        link: UcxLink,
        loop: LoopClock,
        budget: int,
        rates: RateMeter,
        ranks: Ranks | None = None,
    ) -> None:
        self._engine, self._link, self._budget, self._rates, self._ranks = engine, link, budget, rates, ranks
        self._clock = SuspendAwareClock()
        self._threads = {
            "engine": Watched(lambda: engine.mark, starved=lambda: held_up_s(engine.native_id)),
            "link": Watched(lambda: link.heartbeat, lambda: held_up_s(link.native_id)),
            "loop": Watched(lambda: loop.ticks),
        }
        signs = ranks.signs if ranks is not None else []
        self._others = [Watched(lambda i=i: self._ranks.signs[i]) for i, _ in enumerate(signs)]  # type: ignore

    def look(self) -> None:
        self._clock.tick()
        for each in (*self._threads.values(), *self._others):
            each.look(self._clock.now())

    @property
    def pulse(self) -> Pulse:
        """Return the last observation."""
        engine, link, loop = (round(thread.still_s, 2) for thread in self._threads.values())
        return Pulse(engine, link, loop, round(self._usual_s, 4))

    @property
    def fault(self) -> str | None:
        """Return the fault of a thread; an ended one comes before a hanging one."""
        if self._link.fault is not None:
            return f"the link thread ended: {self._link.fault}"
        ended = self._ranks.ended if self._ranks is not None else None
        return ended or self._engine.fault or self._hang()

    @property
    def _usual_s(self) -> float:
        """What a turn of the engine takes at most, as a rule."""
        rates = self._rates.rates
        return max(rates.step_s, self._budget / max(1.0, rates.prefill_tokens_per_s))

    def _hang(self) -> str | None:
        pulse = self.pulse
        if pulse.engine_s - self._threads["engine"].starved_s > max(ENGINE_S, SLOW * self._usual_s):
            return f"a turn of the engine has taken {pulse.engine_s:.0f} s"
        if pulse.link_s > LINK_S:
            return f"a round of the link has taken {pulse.link_s:.0f} s"
        if pulse.loop_s > LOOP_S:
            return f"the asyncio loop has stood still for {pulse.loop_s:.0f} s"
        for rank, other in enumerate(self._others, 1):
            if other.still_s > RANK_S:
                return f"rank {rank} has stood still for {other.still_s:.0f} s"
        return None


class Watchdog:
    """The thread that looks, from `start` to `stop`.

    A fault is told once, on it, to `on_fault`; if nobody has stopped it LAST_S later, `last` is called, with the fault:
    the loop hangs too.

    of_process   the process ends, too, when the interpreter itself is held up for INTERPRETER_S
    """

    def __init__(
        self,
        vitals: ThreadVitals,
        on_fault: Callable[[], None],
        last: Callable[[str], None],
        *,
        of_process: bool,
    ) -> None:
        self._vitals, self._on_fault, self._last, self._of_process = vitals, on_fault, last, of_process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. The node ends as it was asked to."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(LOOK_S):
            if self._of_process and looks % 50 == 0:
                faulthandler.dump_traceback_later(INTERPRETER_S, exit=True)
            looks += 1
            self._vitals.look()
            if (fault := self._vitals.fault) is not None:
                self._on_fault()
                if not self._stop.wait(LAST_S):
                    self._last(fault)
                break
        if self._of_process:
            faulthandler.cancel_dump_traceback_later()
