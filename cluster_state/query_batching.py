"""Batching of concurrent index queries into one round trip."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvferry.cluster_state.redis_client import sensible
from kvferry.protocol.errors import KvferryError, RegistryUnavailable

MOST_BYTES = 2**18
"""Most bytes of the queries in one call; a longer query is sent alone."""

Question = tuple[bytes, ...]
Waiting = tuple[Question, asyncio.Future[Any]]


class QueryBatcher:
    """Batches queries. `call` takes several queries and returns as many answers, in their order.

    Queries made in the same iteration of the loop are sent together. A caller that is cancelled, or stops waiting after
    `limit_s` seconds, does not affect the other callers of its batch."""

    def __init__(self, call: Callable[[Sequence[Question]], Awaitable[Any]], limit_s: float) -> None:
        self._call, self._limit_s = call, limit_s
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question) -> Any:
        """Return the answer to a query. Raises RegistryUnavailable, also if no answer comes in time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((question, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)
        found = await answer  # `_answer` or `_late` sets it
        if isinstance(found, KvferryError):
            raise copy.copy(found) from found
        return found

    def _send(self) -> None:
        asked, self._waiting = [each for each in self._waiting if not each[1].done()], []
        while asked:
            size, together = 0, list[Waiting]()
            while asked and (not together or size + _size(asked[0]) <= MOST_BYTES):
                size += _size(asked[0])
                together.append(asked.pop(0))
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._answer(together))
            self._calls.add(task)
            limit = loop.call_later(self._limit_s, self._late, together, task)
            task.add_done_callback(partial(self._over, limit))

    async def _answer(self, asked: Sequence[Waiting]) -> None:
        """Make one call and pass each answer, or the error, to its caller.

        Errors are set as results, so that no future with an unretrieved exception remains."""
        try:
            told = await self._call([question for question, _ in asked])
            with sensible():
                found: list[Any] = [answer for _, answer in zip(asked, told, strict=True)]
        except KvferryError as error:
            found = [error] * len(asked)
        for (_, answer), each in zip(asked, found, strict=True):
            if not answer.done():
                answer.set_result(each)

    def _late(self, asked: Sequence[Waiting], task: asyncio.Task[None]) -> None:
        """Give up a call, also if the client loses its cancellation, as `wait_for` of Python 3.11 may."""
        for _, answer in asked:
            if not answer.done():
                answer.set_result(RegistryUnavailable(f"no answer from Redis within {self._limit_s} s"))
        task.cancel()

    def _over(self, limit: asyncio.TimerHandle, task: asyncio.Task[None]) -> None:
        limit.cancel()
        self._calls.discard(task)


def _size(waiting: Waiting) -> int:
    """Return the bytes of the query."""
    return sum(map(len, waiting[0]))
