"""TCP between processes: bytes in order, late by the weather; whole connections break, nothing else is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Any

from tests.virtual.clock import PROCESS, Process, State, VirtualLoop
from tests.virtual.weather import Weather

MIN_S = 1e-7
"""Between two events of one lane."""


class Lanes:
    """Events of one lane keep their order, lanes overtake each other."""

    def __init__(self, loop: VirtualLoop, weather: Weather) -> None:
        self.loop, self.weather = loop, weather
        self._due: dict[Hashable, float] = {}

    def post(
        self, lane: Hashable, process: Process | None, event: Callable[..., Any], *args: Any, late_s: float = 0.0
    ) -> None:
        """As the process's own, or as nobody's: what hardware does goes on beside a frozen process."""
        due = max(self.loop.time() + late_s + self.weather.delay_s(), self._due.get(lane, 0.0) + MIN_S)
        self._due[lane] = due
        self.loop.call_at(due, event, *args, context=process.context if process else self.loop.bare)


class End(asyncio.Transport):
    """One process's side of a connection."""

    def __init__(self, wires: Wires, process: Process, serial: int) -> None:
        super().__init__()
        self.process, self.closed = process, False
        self.protocol: Any = None
        self.other: End | None = None
        self._wires, self._lane = wires, ("wire", serial, process.name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed and self.other is not None:
            self._wires.lanes.post(self._lane, self.other.process, self.other.arrive, bytes(data))

    def arrive(self, data: bytes) -> None:
        if not self.closed:
            self.protocol.data_received(data)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """This end goes; the other one hears of it behind all that was sent."""
        if self.closed:
            return
        self.lose(None)
        if self.other is not None:
            self._wires.lanes.post(self._lane, self.other.process, self.other.lose, None)

    def lose(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self._wires.ends.discard(self)
            self.process.soon(0.0, self.protocol.connection_lost, error)

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Wires:
    """Who listens where, and every connection."""

    def __init__(self, loop: VirtualLoop, lanes: Lanes) -> None:
        self.loop, self.lanes = loop, lanes
        self.ends = _Ordered()
        self._sink: dict[tuple[str, int], tuple[Process, Callable[[], Any]]] = {}
        self._serial = itertools.count()
        loop.dial = self.dial

    def listen(self, process: Process, host: str, port: int, accept: Callable[[], Any]) -> None:
        self._sink[host, port] = (process, accept)

    async def dial(self, factory: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]:
        """As create_connection does. A frozen process's kernel accepts for it."""
        dialling = PROCESS.get()
        assert dialling is not None
        await asyncio.sleep(self.lanes.weather.delay_s())
        process, accept = self._sink.get((host, port), (None, None))
        if process is None or process.state is State.DEAD:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        serial = next(self._serial)
        near, far = End(self, dialling, serial), End(self, process, serial)
        near.other, far.other = far, near
        near.protocol, far.protocol = factory(), accept()
        self.ends |= {near: None, far: None}
        near.protocol.connection_made(near)
        process.soon(0.0, far.protocol.connection_made, far)
        return near, near.protocol

    def between(self, one: Process, other: Process) -> list[End]:
        return [end for end in self.ends if end.process is one and end.other.process is other]

    def cut(self, end: End) -> None:
        """The connection breaks; each side notices in its own time, and what was on its way is lost."""
        for side in (end, end.other):
            side.other = None
            self.lanes.post(("cut", next(self._serial)), side.process, side.lose, ConnectionResetError("cut"))

    def kill(self, process: Process) -> None:
        """The kernel closes what a dead process had open."""
        for end in [end for end in self.ends if end.process is process]:
            end.closed = True
            self.ends.discard(end)
            if end.other is not None:
                reset = ConnectionResetError("the process died")
                self.lanes.post(end._lane, end.other.process, end.other.lose, reset)


class _Ordered(dict[End, None]):
    """A set that keeps its order, so that a seed is repeated exactly."""

    def discard(self, end: End) -> None:
        self.pop(end, None)
