"""An asyncio loop whose time is virtual, and processes in it that can be frozen and killed.

The loop never waits: when nothing is ready, its clock goes on to the next timer. Every callback belongs to the process
in whose context it was scheduled, so what a process does, tasks and timers included, stops with it.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from enum import Enum, auto
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")


class State(Enum):
    RUNNING, FROZEN, DEAD = auto(), auto(), auto()


class Process:
    """Frozen, its callbacks wait until it thaws; dead, they never run."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop, self.name, self.state = loop, name, State.RUNNING
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self.frozen_s = 0.0
        self._frozen_at = 0.0
        self._held: list[asyncio.Handle] = []

    def soon(self, delay_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Run a call as this process's own."""
        self.loop.call_at(self.loop.time() + delay_s, call, *args, context=self.context)

    def task(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work, name=self.name, context=self.context)

    def freeze(self) -> None:
        if self.state is State.RUNNING:
            self.state, self._frozen_at = State.FROZEN, self.loop.time()

    def thaw(self) -> None:
        if self.state is State.FROZEN:
            self.state = State.RUNNING
            self.frozen_s += self.loop.time() - self._frozen_at
            self._release()

    def kill(self) -> None:
        self.state = State.DEAD

    def bury(self) -> None:
        """The simulation is over: what it left may be cleaned up."""
        self.state = State.RUNNING
        self._release()

    def admits(self, handle: asyncio.Handle) -> bool:
        if self.state is State.RUNNING:
            return True
        self._held.append(handle)
        return False

    def _release(self) -> None:
        held, self._held = self._held, []
        self.loop.ready(held)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Handle(asyncio.Handle):
    _context: Context

    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is None or process.admits(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    _context: Context
    _scheduled: bool

    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is None or process.admits(self):
            super()._run()


class Stuck(Exception):
    """Nothing is ready and nothing is timed: somebody waits without end."""


class _Clockwork(selectors.SelectSelector):
    """Waits for nothing but the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`dial` makes the connections that are asked for by host and port."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._clockwork = _Clockwork()
        super().__init__(self._clockwork)
        self.dial: Callable[[Any, str, int], Awaitable[tuple[Any, Any]]] | None = None
        self.bare = Context()

    def time(self) -> float:
        return self._clockwork.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self._call_soon(callback, args, context)

    def ready(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        assert self.dial is not None
        return await self.dial(protocol_factory, host, port)
