"""RedisHeld: a batch in Redis that this process holds; it writes answers and publishes them as a file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvferry.cluster_state.redis_batch_rows import ROWS, Answered, RedisBatchRows, rows_id
from kvferry.cluster_state.redis_batches import RedisBatches
from kvferry.cluster_state.redis_files import CHUNK, RedisFiles
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.router.batch.batch import ENDED, Batch
from kvferry.router.batch.files import StoredFile, no_file, read_file, too_large, too_many
from kvferry.router.batch.rows import MAX_ROWS, Row
from kvferry.router.batch.stores import BatchKey, LostBatch
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 2.0
"""Shortest and longest pause between two tries while Redis does not answer, in seconds."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RedisParts:
    """Redis accessors that files and batches share; ttl_s and limit: see RedisBatchStore."""

    files: RedisFiles
    batches: RedisBatches
    rows: RedisBatchRows
    ttl_s: float
    limit: int


class RedisHeld:
    """Batch that this process holds under a number. Implements stores.HeldBatch.

    While Redis does not answer, calls wait, and so do the rows whose answers they write."""

    def __init__(self, parts: RedisParts, key: BatchKey, batch: Batch, fence: int) -> None:
        self.batch, self._parts, self._key, self._fence = batch, parts, key, fence
        self._answered: dict[int, Answered] = {}
        self._warnings = RateLimitedLog(log)

    async def take(self) -> None:
        """Read which rows have answers. Raises RegistryUnavailable."""
        for shard in range(-(-self._rows() // ROWS)):
            self._answered |= await self._parts.rows.rows(*self._key, shard)
        counts = self.batch.request_counts
        counts["completed"] = sum(row.ok for row in self._answered.values())
        counts["failed"] = len(self._answered) - counts["completed"]

    def answered(self, row: Row) -> bool:
        return row.number in self._answered

    async def cancelling(self) -> bool:
        holds, cancel = await self._retried(lambda: self._parts.batches.holding(*self._key, self._fence))
        if not holds:
            raise LostBatch
        return cancel

    async def save(self) -> None:
        record, ended = self.batch.record().encode(), self.batch.status in ENDED
        save = self._parts.batches.save
        if not await self._retried(lambda: save(*self._key, self._fence, record, ended=ended)):
            raise LostBatch

    async def input(self) -> AsyncIterator[bytes]:
        where, file_id = self._key.where, self.batch.input_file_id
        record = await self._retried(lambda: self._parts.files.record(where, file_id))
        stored = None if record is None else read_file(record)
        if stored is None:
            raise no_file(file_id, "input_file_id")
        return self._input(stored)

    async def write(self, row: Row, line: bytes, *, ok: bool) -> None:
        write = self._parts.rows.write
        result = await self._retried(lambda: write(*self._key, self._fence, row.number, line, ok=ok))
        if result == "lost":
            raise LostBatch
        if result == "full":
            raise too_large(len(line), 0, self._parts.limit)
        self._answered[row.number] = Answered(ok, max(1, -(-len(line) // CHUNK)), len(line))

    async def publish(self, *, ok: bool) -> str | None:
        await self.cancelling()
        rows = {number: row for number, row in sorted(self._answered.items()) if row.ok == ok}
        return await self._retried(lambda: self._publish(rows, ok=ok)) if rows else None

    async def clear(self) -> None:
        await self._retried(lambda: self._parts.rows.clear(*self._key, self._rows()))
        for ok in (True, False):
            counted = rows_id(self.batch.id, ok=ok)
            await self._retried(partial(self._parts.files.release, self._key.where, counted))

    async def release(self) -> None:
        """Do nothing, since the next holder fences this one."""

    async def _publish(self, rows: dict[int, Answered], *, ok: bool) -> str:
        """Copy answers into a file, unless another run did; they then count as a file, not as answers."""
        where, counted = self._key.where, rows_id(self.batch.id, ok=ok)
        file_id, size, now = self.batch.file_id(ok=ok), sum(row.bytes for row in rows.values()), int(time.time())
        files = self._parts.files
        reserved = await files.reserve(where, file_id, size, counted)
        if reserved.result == "full":
            raise too_large(size, reserved.number, self._parts.limit)
        if reserved.result == "many":
            raise too_many(reserved.number)
        if reserved.result == "there":
            return file_id
        written, waiting = 0, bytearray()
        for fields in _groups(rows):
            waiting += await self._parts.rows.pieces(*self._key, fields[0][0] // ROWS, fields)
            while len(waiting) >= CHUNK:
                await files.write(where, file_id, written, bytes(waiting[:CHUNK]))
                del waiting[:CHUNK]
                written += 1
        if waiting:
            await files.write(where, file_id, written, bytes(waiting))
        expires = int(now + self._parts.ttl_s)
        stored = StoredFile(file_id, size, now, self.batch.file_name(ok=ok), "batch_output", expires)
        if not await files.commit(where, file_id, -(-size // CHUNK), stored.record().encode(), counted):
            raise RegistryUnavailable("Redis: a part of the file was lost while it was written")
        return file_id

    async def _input(self, stored: StoredFile) -> AsyncIterator[bytes]:
        for number in range(-(-stored.bytes // CHUNK)):
            piece = await self._retried(partial(self._parts.files.piece, self._key.where, stored.id, number))
            if piece is None:
                raise no_file(stored.id, "input_file_id")
            yield piece

    async def _retried(self, call: Callable[[], Awaitable[R]]) -> R:
        """Call again until Redis answers."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return await call()
            except RegistryUnavailable as error:
                self._warnings.warning("%s waits for Redis: %s", self.batch.id, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _rows(self) -> int:
        """Return how many rows may have answers."""
        return min(self.batch.request_counts["total"], MAX_ROWS)


def _groups(rows: dict[int, Answered]) -> Iterator[list[tuple[int, int]]]:
    """Yield row and number of all pieces, in groups of one shard and about CHUNK bytes."""
    group: list[tuple[int, int]] = []
    size = 0
    for row, kept in rows.items():
        if group and (size + kept.bytes > CHUNK or group[0][0] // ROWS != row // ROWS):
            yield group
            group, size = [], 0
        for number in range(kept.pieces):
            if number:
                yield group
                group, size = [], 0
            group.append((row, number))
            size += min(CHUNK, kept.bytes - number * CHUNK)
    if group:
        yield group
