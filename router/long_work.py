"""Paces work on long bodies and media: it runs on the event loop in slices, which take a quarter of a core together.

A slice is short, but at full speed the slices of a body of 16 MiB keep a core busy for a tenth of a second. A node's
step beside it takes twice as long then, if router and nodes share cores. Sources take turns, so that many bodies of
one delay its own."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextvars import ContextVar
from weakref import WeakKeyDictionary

SOURCE: ContextVar[str] = ContextVar("source", default="")
"""Tenant, or address of a client without a key, whose work the current code does; set where the body is read."""
SHARE = 0.25
"""Share of a core that all slices of an event loop take together, so long as they follow one another."""
MIN_SLEEP_S = 0.002
"""Shortest wait between two slices, in seconds; shorter ones add up first, since timers count milliseconds."""


class LongWork:
    """Work of one request, from its creation on in slices, each of which ends with `pause`.

    Between two calls the task must wait for nothing else, since the CPU time of the thread between them is counted."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.thread_time()

    async def pause(self) -> None:
        """End a slice; return when the next one may run, after other work of the event loop."""
        await paced(time.thread_time() - self._began)
        self._began = time.thread_time()


async def paced(cost_s: float) -> None:
    """Wait until the work before has had its time, and count work that takes `cost_s` seconds of CPU."""
    loop = asyncio.get_running_loop()
    await (_paces.get(loop) or _paces.setdefault(loop, _Pace())).turn(cost_s, SOURCE.get())


class _Pace:
    """Turns of the slices on one event loop: sources take them round robin, each for its slices in order."""

    def __init__(self) -> None:
        self._free_at, self._timed = 0.0, False
        self._waiting = OrderedDict[str, OrderedDict[asyncio.Future[None], float]]()
        """Costs of waiting slices in seconds, by source, the next source first."""

    async def turn(self, cost_s: float, source: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting and self._is_free(loop):
            self._take(loop, cost_s)
            await asyncio.sleep(0)
            return
        turn = loop.create_future()
        self._waiting.setdefault(source, OrderedDict())[turn] = cost_s
        self._set_timer(loop)
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(source, turn)
            raise

    def _leave(self, source: str, turn: asyncio.Future[None]) -> None:
        """Forget a slice that waits no longer; its turn may have come."""
        if queue := self._waiting.get(source):
            queue.pop(turn, None)
            if not queue:
                del self._waiting[source]

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give turns to the next sources until a wait is long enough for a timer."""
        self._timed = False
        while self._waiting and self._is_free(loop):
            source, queue = next(iter(self._waiting.items()))
            turn, cost_s = queue.popitem(last=False)
            self._waiting.move_to_end(source)
            if not queue:
                del self._waiting[source]
            if not turn.done():  # its request was not cancelled just now
                self._take(loop, cost_s)
                turn.set_result(None)
        if self._waiting:
            self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._timed:
            self._timed = True
            loop.call_at(self._free_at, self._next, loop)

    def _is_free(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._free_at - loop.time() < MIN_SLEEP_S

    def _take(self, loop: asyncio.AbstractEventLoop, cost_s: float) -> None:
        self._free_at = max(self._free_at, loop.time()) + cost_s / SHARE


_paces = WeakKeyDictionary[asyncio.AbstractEventLoop, _Pace]()
