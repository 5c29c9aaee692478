"""Batching of concurrent index queries into one round trip."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvferry.cluster_state.redis_client import sensible
from kvferry.protocol.errors import KvferryError, RegistryUnavailable

MOST_BYTES = 2**18
"""Of the questions of one call; a longer one goes alone."""

Question = tuple[bytes, ...]
Waiting = tuple[Question, asyncio.Future[Any]]


class QueryBatcher:
    """`ask` is answered by `call`, which takes several questions and gives as many answers in their order.

    Those that are asked before the loop comes to them go together. A call belongs to none of those who wait for it:
    each of them may be cancelled, or stop to wait after `limit_s`, and the others have their answers."""

    def __init__(self, call: Callable[[Sequence[Question]], Awaitable[Any]], limit_s: float) -> None:
        self._call, self._limit_s = call, limit_s
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question) -> Any:
        """Raises RegistryUnavailable, also where there is no answer in time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((question, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)
        try:
            async with asyncio.timeout(self._limit_s):
                found = await answer
        except TimeoutError:
            raise RegistryUnavailable(f"no answer from Redis within {self._limit_s} s") from None
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
            task = asyncio.get_running_loop().create_task(self._answer(together))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, asked: Sequence[Waiting]) -> None:
        """An error is everybody's answer, and never left to be retrieved from a future."""
        try:
            async with asyncio.timeout(self._limit_s):
                told = await self._call([question for question, _ in asked])
            with sensible():
                found: list[Any] = [answer for _, answer in zip(asked, told, strict=True)]
        except TimeoutError:
            found = [RegistryUnavailable(f"no answer from Redis within {self._limit_s} s")] * len(asked)
        except KvferryError as error:
            found = [error] * len(asked)
        for (_, answer), each in zip(asked, found, strict=True):
            if not answer.done():
                answer.set_result(each)


def _size(waiting: Waiting) -> int:
    """Bytes of the question."""
    return sum(map(len, waiting[0]))
