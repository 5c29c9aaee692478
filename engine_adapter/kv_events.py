"""Reader of an engine's KV events: batches in order, without gaps, or a reset where one was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvferry.engine_adapter.engine import KvEventSource
from kvferry.engine_adapter.kv_event_batch import EventBatch, MalformedBatch, decode
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.adapter")

POLL_S = 2.0
"""Seconds of silence after which the newest batch is asked for again: an engine that then has another one there
restarted, and if it has a later one, that was lost."""


class EventWire(Protocol):
    """Connection to an engine's KV events; a payload comes with its sequence number."""

    @property
    def repeats(self) -> bool:
        """Return whether batches can be asked for."""
        ...

    async def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Return the next published batch; None if none came in time."""
        ...

    def ask(self, start: int) -> AsyncGenerator[tuple[int, bytes] | None, None]:
        """Yield batches from `start` on that the engine still has; None follows a complete answer."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything known from events may be wrong. restarted: the numbers began again, so it is a new engine process."""

    reason: str
    restarted: bool = False


@dataclass(slots=True)
class KvEventCounters:
    """Counts since the start.

    gaps       times that published batches were missing
    repeated   batches that came from the engine's store of recent ones
    old        batches dropped because they were known
    unread     batches that could not be read
    unknown    events of unknown types
    malformed  events of stored blocks that could not be read"""

    batches: int = 0
    gaps: int = 0
    repeated: int = 0
    resets: int = 0
    restarts: int = 0
    old: int = 0
    unread: int = 0
    unknown: int = 0
    malformed: int = 0


class KvEvents:
    """Reads the batches of one engine. Belongs to one asyncio loop.

    wire: connection to use, by default ZeroMQ. Raises ConfigError if pyzmq is not installed."""

    def __init__(self, source: KvEventSource, wire: EventWire | None = None, *, poll_s: float = POLL_S) -> None:
        self._wire, self._poll_s = wire or _zmq_wire(source), poll_s
        self.counters = KvEventCounters()
        self._warn = RateLimitedLog(log)
        self._next: int | None = None  # None: nothing was read yet
        self._last_at = self._first_at = 0.0  # times of the newest batch, and of number 0; 0: none
        self._repeated = False  # whether the engine ever repeated a batch

    async def batches(self) -> AsyncGenerator[EventBatch | Reset, None]:
        """Yield batches in the order of their numbers, from the oldest that the engine still has.

        A batch that is lost for good gives a Reset. So does one that cannot be read, because it may have removed
        blocks."""
        try:
            async for item in self._catch_up():
                yield item
            while True:
                await asyncio.sleep(0)  # Other tasks get a turn, however many batches wait.
                message = await self._wire.receive(self._poll_s)
                if message is None or (self._next is not None and message[0] > self._next):
                    self.counters.gaps += message is not None
                    async for item in self._catch_up():
                        yield item
                if message is None:
                    continue
                if self._next is not None and message[0] > self._next:
                    yield self._reset(f"{message[0] - self._next} batches before {message[0]} are lost")
                    self._next = message[0]
                for item in self._take(*message):
                    yield item
                    if isinstance(item, Reset) and item.restarted:
                        async for repeated in self._catch_up():
                            yield repeated
        finally:
            self._wire.close()

    def _take(self, number: int, payload: bytes) -> list[EventBatch | Reset]:
        """Return what follows from a batch that is the next one, or an old one."""
        try:
            batch = decode(payload)
        except MalformedBatch as error:
            batch, fault = None, error
        if self._next is not None and number < self._next:
            if batch is None or not self._restarted(number, batch.sent_at):
                self.counters.old += 1
                return []
            reset = self._begin_again(f"the engine publishes number {number} again")
            return [reset] if self._wire.repeats else [reset, *self._take(number, payload)]
        self._next = number + 1
        self.counters.batches += 1
        if batch is None:
            self.counters.unread += 1
            return [self._reset(f"batch {number} is unreadable: {fault}")]
        self._last_at = batch.sent_at
        if number == 0:
            self._first_at = batch.sent_at
        self.counters.unknown += batch.unknown
        self.counters.malformed += batch.malformed
        if batch.unknown or batch.malformed:
            self._warn.warning(
                "KV events: %d of unknown types, %d unreadable in one batch", batch.unknown, batch.malformed
            )
        return [batch]

    async def _catch_up(self) -> AsyncGenerator[EventBatch | Reset, None]:
        """Ask for all batches after the newest one until the engine has no more, and yield them.

        The newest one is requested again, too: it shows whether the numbers are still those of the same process."""
        while self._wire.repeats:
            begun, answered, ended = self._next, False, False
            async with aclosing(self._wire.ask(max(0, (begun or 0) - 1))) as answer:
                async for found in answer:
                    if found is None:
                        ended = True
                        break
                    await asyncio.sleep(0)
                    number, payload = found
                    due = number if self._next is None else self._next
                    if number > due and answered and self._next != begun:
                        break  # A hole in the answer: ask for the rest again.
                    if number > due:
                        yield self._reset(f"the engine keeps no batch before {number}; {number - due} are lost")
                        self._next = number
                    answered = self._repeated = True
                    known, old = self.counters.batches, self.counters.old
                    for item in self._take(number, payload):
                        yield item
                    self.counters.repeated += self.counters.batches - known
                    self.counters.old = old
                    if self._next is None:
                        break  # Another engine answers: ask for all that it has.
            if ended and not answered and begun and self._repeated:
                yield self._begin_again(f"the engine does not know its batch {begun - 1} any more")
            elif ended or self._next == begun:
                if ended and self._next is None:
                    self._next = 0  # It published nothing yet, so its first batch can be missed.
                return

    def _restarted(self, number: int, sent_at: float) -> bool:
        """Return whether a batch with an old number is a new one: then another process numbers them."""
        return sent_at > self._last_at or (number == 0 and self._first_at not in (0.0, sent_at))

    def _begin_again(self, reason: str) -> Reset:
        self.counters.restarts += 1
        self._next, self._repeated = None, False
        return self._reset(reason, restarted=True)

    def _reset(self, reason: str, *, restarted: bool = False) -> Reset:
        self.counters.resets += 1
        self._warn.warning("forgetting what is known of the engine's cache: %s", reason)
        return Reset(reason, restarted)


class Mirror(Protocol):
    """Receiver of an engine's KV events."""

    def take(self, batch: EventBatch) -> None:
        """Apply a batch."""
        ...

    def forget(self) -> None:
        """Forget everything."""
        ...


async def follow(events: KvEvents, mirror: Mirror, restarted: Callable[[], None]) -> None:
    """Apply all batches to a mirror until cancelled. restarted: called when another engine publishes."""
    async with aclosing(events.batches()) as batches:
        async for item in batches:
            if isinstance(item, EventBatch):
                mirror.take(item)
            else:
                mirror.forget()
                if item.restarted:
                    restarted()


def _zmq_wire(source: KvEventSource) -> EventWire:
    try:
        from kvferry.engine_adapter.zmq_events import ZmqEvents
    except ImportError as error:
        raise ConfigError("KV events need pyzmq: pip install 'kvferry[adapter]'", param="engine") from error
    return ZmqEvents(source)
