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

Query = tuple[bytes, ...]
PendingQuery = tuple[Query, asyncio.Future[Any]]


class QueryBatcher:
    """Batcher of queries. `call` takes several queries and returns as many answers, in their order.

    send_now: sends queries without a task and returns a future of their answers, or None if it cannot. In that case,
    after an error of the future, and without `send_now`, the batch goes through `call`.

    Queries made in the same iteration of the loop are sent together. A caller that is cancelled, or stops waiting after
    `limit_s` seconds, does not affect the other callers of its batch."""

    def __init__(
        self,
        call: Callable[[Sequence[Query]], Awaitable[Any]],
        limit_s: float,
        send_now: Callable[[Sequence[Query]], asyncio.Future[Any] | None] | None = None,
    ) -> None:
        self._call, self._send_now, self._limit_s = call, send_now, limit_s
        self._pending: list[PendingQuery] = []
        self._calls: set[asyncio.Future[Any]] = set()

    async def ask(self, query: Query) -> Any:
        """Return the answer to a query. Raises RegistryUnavailable, also if no answer arrives in time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._pending.append((query, answer))
        if len(self._pending) == 1:
            loop.call_soon(self._send)
        found = await answer  # set by `_deliver` or `_time_out`
        if isinstance(found, KvferryError):
            raise copy.copy(found) from found
        return found

    def _send(self) -> None:
        batch, self._pending = [each for each in self._pending if not each[1].done()], []
        while batch:
            size, group = 0, list[PendingQuery]()
            while batch and (not group or size + _size(batch[0]) <= MAX_BYTES):
                size += _size(batch[0])
                group.append(batch.pop(0))
            sent = self._send_now([query for query, _ in group]) if self._send_now else None
            if sent is None:
                self._limit_time(group, asyncio.create_task(self._answer(group)))
            else:
                sent.add_done_callback(partial(self._sent_done, group))
                self._limit_time(group, sent)

    def _limit_time(self, batch: Sequence[PendingQuery], call: asyncio.Future[Any]) -> None:
        """Cancel the call after the time limit."""
        self._calls.add(call)
        limit = asyncio.get_running_loop().call_later(self._limit_s, self._time_out, batch, call)
        call.add_done_callback(partial(self._finish, limit))

    def _sent_done(self, batch: Sequence[PendingQuery], call: asyncio.Future[Any]) -> None:
        """Pass the answers of a sent batch to its callers."""
        if call.cancelled():
            return
        if call.exception() is not None:
            self._limit_time(batch, asyncio.create_task(self._answer(batch)))
            return
        self._deliver_answers(batch, call.result())

    async def _answer(self, batch: Sequence[PendingQuery]) -> None:
        """Make one call and pass each answer, or the error, to its caller.

        Errors are set as results, so that no future with an unretrieved exception remains."""
        try:
            self._deliver_answers(batch, await self._call([query for query, _ in batch]))
        except KvferryError as error:
            self._deliver(batch, [error] * len(batch))

    def _deliver_answers(self, batch: Sequence[PendingQuery], answers: Any) -> None:
        try:
            with sensible():
                found = [answer for _, answer in zip(batch, answers, strict=True)]
        except RegistryUnavailable as error:
            found = [error] * len(batch)
        self._deliver(batch, found)

    def _deliver(self, batch: Sequence[PendingQuery], found: Sequence[Any]) -> None:
        for (_, answer), each in zip(batch, found, strict=True):
            if not answer.done():
                answer.set_result(each)

    def _time_out(self, batch: Sequence[PendingQuery], call: asyncio.Future[Any]) -> None:
        """Fail the callers of a late call, since the client may lose its cancellation (`wait_for` of Python 3.11)."""
        for _, answer in batch:
            if not answer.done():
                answer.set_result(RegistryUnavailable(f"no answer from Redis within {self._limit_s} s"))
        call.cancel()

    def _finish(self, limit: asyncio.TimerHandle, call: asyncio.Future[Any]) -> None:
        limit.cancel()
        self._calls.discard(call)


def _size(waiting: PendingQuery) -> int:
    """Return the bytes of the query."""
    return sum(map(len, waiting[0]))
