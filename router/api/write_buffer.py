"""Write buffer of a stream: coalesces tokens that arrive together into one write.

A write to a socket costs as much as the rest of what a token takes here. What is added in one turn of the loop is
written in the next: a router that keeps up writes each token by itself; one that is behind finds several tokens of a
stream at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextvars import copy_context
from types import coroutine
from typing import Any

from kvferry.router.api.responder import Responder

MOST_BYTES = 64 * 1024
"""Held back at most, and one event; the client's pace is asked for then."""


class WriteBuffer:
    """Bytes of one stream, written by themselves, without a task while the client takes them."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """Of the request: what is heard is added in that of its node's stream."""
        self._parts: list[bytes] = []
        self._size = 0
        self._waiting: asyncio.Future[None] | None = None
        """A write that the client must be waited for, or that failed."""

    def add(self, data: bytes) -> bool:
        """Return whether more may be added before `flush` was awaited."""
        if data:
            if not self._parts:
                self._loop.call_soon(self._write, context=self._context)
            self._parts.append(data)
            self._size += len(data)
        return self._waiting is None and self._size < MOST_BYTES

    async def flush(self) -> None:
        """Returns once the client's connection has taken all."""
        if data := await self.last():
            await self._responder.write(data)

    async def last(self) -> bytes:
        """Return the unwritten rest once all before it is written, for a caller that writes it with more."""
        while (waiting := self._waiting) is not None:
            await waiting
            self._written(waiting)  # whose turn may not have come yet
        return self._take()

    def drop(self) -> None:
        """Discard the buffer: its client is gone."""
        self._take()
        if self._waiting is not None:
            self._waiting.cancel()

    def _take(self) -> bytes:
        data, self._size = b"".join(self._parts), 0
        self._parts.clear()
        return data

    def _write(self) -> None:
        if self._parts and self._waiting is None:
            try:
                step = self._responder.write(self._take()).__await__()
                waits = step.send(None)
            except StopIteration:
                return
            except Exception as error:
                self._waiting = self._loop.create_future()
                self._waiting.set_exception(error)
            else:
                self._waiting = self._loop.create_task(_resumed(step, waits))
            self._waiting.add_done_callback(self._written)

    def _written(self, waiting: asyncio.Future[None]) -> None:
        """Go on with what came meanwhile, unless the write failed, which anyone who flushes is told."""
        if waiting is self._waiting and not waiting.cancelled() and waiting.exception() is None:
            self._waiting = None
            self._write()


@coroutine
def _resumed(step: Generator[Any, Any, None], waits: Any) -> Generator[Any, Any, None]:
    """The rest of a step that has begun to wait."""
    try:
        while True:
            try:
                sent = yield waits
            except BaseException as error:
                waits = step.throw(error)
            else:
                waits = step.send(sent)
    except StopIteration:
        return
