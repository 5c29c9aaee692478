"""RedisBatchStore: files and batches in the cluster's Redis, where any router of the cluster reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from kvferry.cluster_state.redis_batch_rows import RedisBatchRows
from kvferry.cluster_state.redis_batches import RedisBatches
from kvferry.cluster_state.redis_files import CHUNK, FilesClient, RedisFiles, tenant_key
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.settings import RouterSettings
from kvferry.router.batch import files
from kvferry.router.batch.batch import ENDED, Batch, check_batch_id, no_batch
from kvferry.router.batch.files import Readable, StoredFile, check_file_id, no_file, read_file, too_large, too_many
from kvferry.router.batch.redis_held import RedisHeld, RedisParts
from kvferry.router.batch.stores import BatchKey

log = logging.getLogger(__name__)


class RedisTenantFiles:
    """Files of one tenant. Implements stores.TenantFiles."""

    def __init__(self, parts: RedisParts, tenant: str) -> None:
        self._files, self._ttl_s, self._limit = parts.files, parts.ttl_s, parts.limit
        self._where = tenant_key(tenant)

    async def add(self, content: Readable, filename: str, purpose: str) -> StoredFile:
        size = await asyncio.to_thread(_size, content)
        now, file_id = int(time.time()), f"file-{uuid.uuid4().hex}"
        stored = StoredFile(file_id, size, now, filename[:255], purpose, int(now + self._ttl_s))
        with explained():
            await self._reserve(file_id, size)
            try:
                for number in range(-(-size // CHUNK)):
                    await self._files.write(self._where, file_id, number, await asyncio.to_thread(content.read, CHUNK))
                if not await self._files.commit(self._where, file_id, -(-size // CHUNK), stored.record().encode()):
                    raise RegistryUnavailable("Redis: a part of the file was lost while it arrived")
            except BaseException:
                with contextlib.suppress(RegistryUnavailable):
                    await self._files.delete(self._where, file_id, -(-size // CHUNK))
                raise
        return stored

    async def all(self) -> list[StoredFile]:
        with explained():
            found = [read_file(record) for record in await self._files.records(self._where)]
        known = [file for file in found if file is not None]
        return sorted(known, key=lambda file: (file.created_at, file.id), reverse=True)

    async def get(self, file_id: str, param: str = "file_id") -> StoredFile:
        check_file_id(file_id, param)
        with explained():
            record = await self._files.record(self._where, file_id)
        stored = None if record is None else read_file(record)
        if stored is None:
            raise no_file(file_id, param)
        return stored

    async def open(self, file_id: str) -> tuple[AsyncIterator[bytes], int]:
        stored = await self.get(file_id)
        return self._pieces(stored), stored.bytes

    async def delete(self, file_id: str) -> None:
        stored = await self.get(file_id)
        with explained():
            await self._files.delete(self._where, file_id, -(-stored.bytes // CHUNK))

    async def remaining(self) -> int:
        with explained():
            return await self._files.remaining(self._where)

    async def _reserve(self, file_id: str, size: int) -> None:
        reserved = await self._files.reserve(self._where, file_id, size)
        if reserved.result == "full":
            raise too_large(size, reserved.number, self._limit)
        if reserved.result == "many":
            raise too_many(reserved.number)

    async def _pieces(self, stored: StoredFile) -> AsyncIterator[bytes]:
        for number in range(-(-stored.bytes // CHUNK)):
            piece = await self._files.piece(self._where, stored.id, number)
            if piece is None:
                raise RegistryUnavailable(f"Redis: a part of {stored.id} is missing")
            yield piece


class RedisTenantBatches:
    """Batches of one tenant. Implements stores.TenantBatches."""

    def __init__(self, batches: RedisBatches, tenant: str) -> None:
        self._batches, self._where = batches, tenant_key(tenant)

    async def create(self, batch: Batch) -> None:
        with explained():
            await self._batches.create(self._where, batch.id, batch.record().encode())

    async def get(self, batch_id: str) -> Batch:
        check_batch_id(batch_id)
        with explained():
            found = await self._batches.get(self._where, batch_id)
        if found is None:
            raise no_batch(batch_id)
        try:
            batch = Batch.of_record(found[0])
        except (ValueError, TypeError):
            raise no_batch(batch_id) from None
        if found[1] and batch.status not in ENDED:
            batch.move("cancelling")
        return batch

    async def all(self) -> list[Batch]:
        found = []
        with explained():
            for record, cancel in await self._batches.all(self._where):
                with contextlib.suppress(ValueError, TypeError):
                    batch = Batch.of_record(record)
                    if cancel and batch.status not in ENDED:
                        batch.move("cancelling")
                    found.append(batch)
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def forget(self, batch_id: str) -> None:
        with explained():
            await self._batches.forget(self._where, batch_id)

    async def cancel(self, batch_id: str) -> None:
        with explained():
            if not await self._batches.cancel(self._where, batch_id):
                raise no_batch(batch_id)


class RedisBatchStore:
    """Files and batches of a cluster. Implements stores.BatchStore.

    ttl_s: seconds for which files and batches are kept. limit: bytes of one tenant's files."""

    kind = "batch"

    def __init__(self, connection: FilesClient, *, ttl_s: float, limit: int) -> None:
        self._connection, self._checked = connection, False
        self._parts = RedisParts(
            RedisFiles(connection, ttl_s=ttl_s, limit=limit, max_files=files.MAX_FILES),
            RedisBatches(connection, ttl_s=ttl_s),
            RedisBatchRows(connection, ttl_s=ttl_s, limit=limit),
            ttl_s,
            limit,
        )

    async def start(self) -> None:
        if self._checked:
            return
        self._checked = True
        try:
            for danger in await self._connection.dangers():
                log.warning("files and batches are in Redis, but %s", danger)
        except RegistryUnavailable:
            self._checked = False

    def files(self, tenant: str) -> RedisTenantFiles:
        return RedisTenantFiles(self._parts, tenant)

    def batches(self, tenant: str) -> RedisTenantBatches:
        return RedisTenantBatches(self._parts.batches, tenant)

    def key(self, batch: Batch) -> BatchKey:
        return BatchKey(tenant_key(batch.tenant), batch.id)

    async def unfinished(self) -> list[BatchKey]:
        return [BatchKey(where, batch_id) for where, batch_id in await self._parts.batches.unfinished()]

    async def hold(self, key: BatchKey) -> RedisHeld | None:
        taken = await self._parts.batches.hold(key.where, key.batch_id)
        try:
            batch = None if taken is None else Batch.of_record(taken[0])
        except (ValueError, TypeError):
            batch = None
        if taken is None or batch is None or tenant_key(batch.tenant) != key.where or batch.status in ENDED:
            await self._parts.batches.close_open(key.where, key.batch_id)
            return None
        held = RedisHeld(self._parts, key, batch, taken[1])
        await held.take()
        return held

    async def close(self) -> None:
        await self._connection.close()


def cluster_files(settings: RouterSettings, seal: Seal) -> RedisBatchStore | None:
    """Return the store of a cluster's files and batches; None if they are on a disk. Raises ConfigError."""
    if settings.files_store != "redis":
        return None
    password_file, limit = settings.redis_password_file, settings.files_mib * 2**20
    connection = FilesClient(settings.redis_url, settings.cluster, password_file=password_file, seal=seal)
    return RedisBatchStore(connection, ttl_s=settings.files_ttl, limit=limit)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Add to errors of Redis that files and batches are unavailable."""
    try:
        yield
    except RegistryUnavailable as error:
        raise type(error)(f"files and batches are unavailable now: {error}") from error


def _size(content: Any) -> int:
    """Return the bytes from the content's position to its end."""
    begin = content.tell()
    end = content.seek(0, os.SEEK_END)
    content.seek(begin)
    return int((content.tell() if end is None else end) - begin)
