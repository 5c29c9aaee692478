"""What a stream's writer holds back while more is at hand: one write for all that came, not one for each token.

A write to a socket costs as much as the rest of what a token takes here. A router that keeps up writes each token by
itself; one that is behind finds several tokens of a stream at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

from router.api.responder import Responder

T = TypeVar("T")

MOST_BYTES = 64 * 1024
"""Held back at most; the client's pace is asked for then."""


class Held:
    """Bytes of one stream that are to be written before anything is waited for."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._parts: list[bytes] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._size += len(data)
            if self._size >= MOST_BYTES:
                await self.flush()

    def take(self) -> bytes:
        """For who writes it with more."""
        data, self._size = b"".join(self._parts), 0
        self._parts.clear()
        return data

    async def flush(self) -> None:
        if self._parts:
            await self._responder.write(self.take())


@coroutine
def flushing(step: Awaitable[T], flush: Callable[[], Awaitable[None]]) -> Generator[Any, Any, T]:
    """The result of `step`. Where it cannot go on without waiting, `flush` is awaited first, once."""
    inner = step.__await__()
    try:
        waits = inner.send(None)
        try:
            yield from flush().__await__()
        except BaseException as error:
            waits = inner.throw(error)
        while True:
            try:
                sent = yield waits
            except BaseException as error:
                waits = inner.throw(error)
            else:
                waits = inner.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result
