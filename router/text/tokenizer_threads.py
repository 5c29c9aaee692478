"""TokenizerThreads: thread pool for tokenization with a lane for short texts and one for long ones."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

from kvferry.protocol.errors import Overloaded

T = TypeVar("T")

SHORT_CHARS = 32_768
"""Longest text of the short lane, in characters; it takes about ten milliseconds."""
MAX_WAITING_CHARS = 2**24
"""Characters that may wait in one lane, some seconds of work; a single call may be longer."""


class TokenizerThreads:
    """Tokenizer threads of one model; a call that is cancelled while it waits does not run."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._short, self._long = _Lane(min(4, max(1, cores // 2))), _Lane(max(1, min(4, cores // 4)))

    async def run(self, call: Callable[..., T], *args: Any, size: int = SHORT_CHARS, of: int = 0) -> T:
        """Return the result of `call(*args)`, run on a thread; raise Overloaded if too much waits.

        `size` is the number of characters to process. `of` is the size of the whole text that the call is a part of;
        calls for smaller texts go first."""
        lane = self._short if size <= SHORT_CHARS else self._long
        return await lane.run(partial(call, *args), size, max(size, of))


class _Lane:
    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._free = threads
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._waiting = 0

    async def run(self, call: Callable[[], T], size: int, rank: int) -> T:
        await self._enter(size, rank)
        work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        work.add_done_callback(self._left)
        return await work

    async def _enter(self, size: int, rank: int) -> None:
        if self._free:
            self._free -= 1
            return
        if self._waiting and self._waiting + size > MAX_WAITING_CHARS:
            raise Overloaded("too much text is waiting to be tokenized", retry_after=2.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (rank, next(self._numbers), turn))
        self._waiting += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise
        finally:
            self._waiting -= size

    def _left(self, work: asyncio.Future[T]) -> None:
        """Start the next call after one ended or was cancelled; it then waits for the thread in the executor."""
        with suppress(asyncio.CancelledError):
            work.exception()
        self._next()

    def _next(self) -> None:
        while self._queue:
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
