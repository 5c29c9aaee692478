"""WriteBuffer: coalesces the events of a stream that arrive together into one socket write.

A socket write costs as much as all other work for a token in the router. `add` writes in the next turn of the event
loop what was added in this one. `add_last` writes at once, for data after which nothing else comes in this turn, since
`DeltaQueue` has joined the tokens of a stream that is behind."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from kvferry.router.api.responder import Responder
from kvferry.runtime.eager_start import start_eagerly

MAX_BYTES = 64 * 1024
"""Bytes held back before the writer must wait for the client."""


class WriteBuffer:
    """Buffer of one stream; it writes by itself, without a task while the client keeps up."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """Context of the request: additions may run in the context of a node's stream."""
        self._parts: list[bytes] = []
        self._size = 0
        self._waiting: asyncio.Future[None] | None = None
        """A write that waits for the client, or that failed."""

    def add(self, data: bytes) -> bool:
        """Append data; return whether more may be added without awaiting `flush` first."""
        if data:
            if not self._parts:
                self._loop.call_soon(self._write, context=self._context)
            self._parts.append(data)
            self._size += len(data)
        return self._waiting is None and self._size < MAX_BYTES

    def add_last(self, data: bytes) -> bool:
        """Append data and write everything now; return what `add` does."""
        if data:
            self._parts.append(data)
            self._size += len(data)
            self._context.run(self._write)
        return self._waiting is None and self._size < MAX_BYTES

    def write_through(self, data: bytes) -> bool:
        """Write data without a detour; return False, with nothing written, where `add_last` has more to do."""
        return not self._parts and self._waiting is None and self._responder.write_chunk(data)

    async def flush(self) -> None:
        """Write everything; return once the client's connection has taken it."""
        if data := await self.last():
            await self._responder.write(data)

    async def last(self) -> bytes:
        """Wait for earlier writes and return the unwritten rest, which the caller writes with more data."""
        while (waiting := self._waiting) is not None:
            await waiting
            self._written(waiting)  # its callback may not have run yet
        return self._take()

    def drop(self) -> None:
        """Discard the data: the client has left."""
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
                rest = start_eagerly(self._responder.write(self._take()))
                if rest is None:
                    return
                self._waiting = self._loop.create_task(rest)
            except Exception as error:
                self._waiting = self._loop.create_future()
                self._waiting.set_exception(error)
            self._waiting.add_done_callback(self._written)

    def _written(self, waiting: asyncio.Future[None]) -> None:
        """Write the data added during a write, unless that failed; `flush` raises its error."""
        if waiting is self._waiting and not waiting.cancelled() and waiting.exception() is None:
            self._waiting = None
            self._write()
