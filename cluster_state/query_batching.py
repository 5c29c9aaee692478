"""Batching of concurrent lookups in the block index into one round trip to Redis."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvferry.cluster_state.redis_client import sensible
from kvferry.protocol.errors import KvferryError, RegistryUnavailable

MAX_BYTES = 2**18
"""Maximum size of the queries in one call, in bytes; a longer query is sent alone."""

Question = tuple[bytes, ...]
Waiting = tuple[Question, asyncio.Future[Any]]


class QueryBatcher:
    """Batcher of queries. `call` takes several queries and returns as many answers, in their order.

    quick: sends queries without a task and returns a future of their answers, or None if it cannot. In that case, after
    an error of the future, and without `quick`, the batch goes through `call`.

    Queries made in the same iteration of the loop are sent together. A caller that is cancelled, or stops waiting after
    `limit_s` seconds, does not affect the other callers of its batch."""

    def __init__(
        self,
        call: Callable[[Sequence[Question]], Awaitable[Any]],
        limit_s: float,
        quick: Callable[[Sequence[Question]], asyncio.Future[Any] | None] | None = None,
    ) -> None:
        self._call, self._quick, self._limit_s = call, quick, limit_s
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Future[Any]] = set()

    async def ask(self, question: Question) -> Any:
        """Return the answer to a query. Raises RegistryUnavailable, also if no answer arrives in time."""
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
            while asked and (not together or size + _size(asked[0]) <= MAX_BYTES):
                size += _size(asked[0])
                together.append(asked.pop(0))
            quick = self._quick([question for question, _ in together]) if self._quick else None
            if quick is None:
                self._follow(together, asyncio.create_task(self._answer(together)))
            else:
                quick.add_done_callback(partial(self._quick_done, together))
                self._follow(together, quick)

    def _follow(self, asked: Sequence[Waiting], call: asyncio.Future[Any]) -> None:
        """Cancel the call after the time limit."""
        self._calls.add(call)
        limit = asyncio.get_running_loop().call_later(self._limit_s, self._late, asked, call)
        call.add_done_callback(partial(self._over, limit))

    def _quick_done(self, asked: Sequence[Waiting], call: asyncio.Future[Any]) -> None:
        """Pass the answers of a quick call to its callers."""
        if call.cancelled():
            return
        if call.exception() is not None:
            self._follow(asked, asyncio.create_task(self._answer(asked)))
            return
        self._pass(asked, call.result())

    async def _answer(self, asked: Sequence[Waiting]) -> None:
        """Make one call and pass each answer, or the error, to its caller.

        Errors are set as results, so that no future with an unretrieved exception remains."""
        try:
            self._pass(asked, await self._call([question for question, _ in asked]))
        except KvferryError as error:
            self._deliver(asked, [error] * len(asked))

    def _pass(self, asked: Sequence[Waiting], told: Any) -> None:
        try:
            with sensible():
                found = [answer for _, answer in zip(asked, told, strict=True)]
        except RegistryUnavailable as error:
            found = [error] * len(asked)
        self._deliver(asked, found)

    def _deliver(self, asked: Sequence[Waiting], found: Sequence[Any]) -> None:
        for (_, answer), each in zip(asked, found, strict=True):
            if not answer.done():
                answer.set_result(each)

    def _late(self, asked: Sequence[Waiting], call: asyncio.Future[Any]) -> None:
        """Fail the callers of a late call, since the client may lose its cancellation (`wait_for` of Python 3.11)."""
        for _, answer in asked:
            if not answer.done():
                answer.set_result(RegistryUnavailable(f"no answer from Redis within {self._limit_s} s"))
        call.cancel()

    def _over(self, limit: asyncio.TimerHandle, call: asyncio.Future[Any]) -> None:
        limit.cancel()
        self._calls.discard(call)


def _size(waiting: Waiting) -> int:
    """Return the bytes of the query."""
    return sum(map(len, waiting[0]))
