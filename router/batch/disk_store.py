"""DiskStore: files and batches in a data directory, which may be a volume that several routers share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from kvferry.protocol.errors import NotFound
from kvferry.router.batch.batch import ENDED, Batch
from kvferry.router.batch.batch_folder import BatchFolder
from kvferry.router.batch.disk_threads import on_disk
from kvferry.router.batch.files import FileStore, Readable, StoredFile, tenant_folder, tenant_folders
from kvferry.router.batch.held_folder import HeldFolder, hold
from kvferry.router.batch.rows import Row
from kvferry.router.batch.stores import PIECE, BatchKey
from kvferry.runtime.private_files import make_private, make_private_folder, write_whole

log = logging.getLogger(__name__)


class DiskFiles:
    """Files of one tenant. Implements stores.TenantFiles."""

    def __init__(self, store: FileStore, tenant: str) -> None:
        self.store, self._tenant = store, tenant

    async def add(self, content: Readable, filename: str, purpose: str) -> StoredFile:
        return await on_disk(self._tenant, self.store.add, content, filename, purpose)

    async def all(self) -> list[StoredFile]:
        return await on_disk(self._tenant, self.store.all)

    async def get(self, file_id: str, param: str = "file_id") -> StoredFile:
        return await on_disk(self._tenant, self.store.get, file_id, param)

    async def open(self, file_id: str) -> tuple[AsyncIterator[bytes], int]:
        file, size = await on_disk(self._tenant, self.store.open, file_id)
        return self._pieces(file), size

    async def delete(self, file_id: str) -> None:
        await on_disk(self._tenant, self.store.delete, file_id)

    async def remaining(self) -> int:
        return await on_disk(self._tenant, self.store.remaining)

    async def _pieces(self, file: BinaryIO) -> AsyncIterator[bytes]:
        with file:
            while piece := await on_disk(self._tenant, file.read, PIECE):
                yield piece


class DiskBatches:
    """Batches of one tenant. Implements stores.TenantBatches."""

    def __init__(self, folder: BatchFolder, tenant: str) -> None:
        self.folder, self._tenant = folder, tenant

    async def create(self, batch: Batch) -> None:
        try:
            await on_disk(self._tenant, self.folder.create, batch)
        except OSError:
            self.folder.forget(batch.id)
            raise

    async def get(self, batch_id: str) -> Batch:
        return await on_disk(self._tenant, self.folder.get, batch_id)

    async def all(self) -> list[Batch]:
        return await on_disk(self._tenant, self.folder.all)

    async def forget(self, batch_id: str) -> None:
        await on_disk(self._tenant, self.folder.forget, batch_id)

    async def cancel(self, batch_id: str) -> None:
        await on_disk(self._tenant, self.folder.cancel, batch_id)


class DiskHeld:
    """A batch that this process holds. Implements stores.HeldBatch."""

    def __init__(self, held: HeldFolder, files: FileStore) -> None:
        self.batch, self._held, self._files, self._tenant = held.batch, held, files, held.batch.tenant

    def answered(self, row: Row) -> bool:
        return row.custom_id in self._held.done

    async def cancelling(self) -> bool:
        return await on_disk(self._tenant, self._held.check)

    async def save(self) -> None:
        await on_disk(self._tenant, self._held.save)

    async def input(self) -> AsyncIterator[bytes]:
        return (await DiskFiles(self._files, self._tenant).open(self.batch.input_file_id))[0]

    async def write(self, row: Row, line: bytes, *, ok: bool) -> None:
        await on_disk(self._tenant, self._held.append, row.custom_id, line, ok=ok)

    async def publish(self, *, ok: bool) -> str | None:
        return await on_disk(self._tenant, self._held.publish, self._files, ok=ok)

    async def clear(self) -> None:
        await on_disk(self._tenant, self._held.clear)

    async def release(self) -> None:
        self._held.close()


class DiskStore:
    """Files and batches of a cluster below `root`. Implements stores.BatchStore.

    limit: bytes of one tenant's files. locks: whether a file lock decides which process runs a batch; otherwise
    leases do."""

    def __init__(self, root: Path, limit: int, *, locks: bool) -> None:
        self.root, self._limit, self._locks = root, limit, locks
        self.kind = "batch"
        self._ended: set[BatchKey] = set()
        self._prepared: asyncio.Future[None] | None = None

    async def start(self) -> None:
        if self._prepared is None:
            self._prepared = asyncio.ensure_future(asyncio.to_thread(self._prepare))
        await asyncio.shield(self._prepared)

    def files(self, tenant: str) -> DiskFiles:
        return DiskFiles(FileStore(self.root, tenant, self._limit), tenant)

    def batches(self, tenant: str) -> DiskBatches:
        return DiskBatches(BatchFolder(self.root / tenant_folder(tenant)), tenant)

    def key(self, batch: Batch) -> BatchKey:
        return BatchKey(tenant_folder(batch.tenant), batch.id)

    async def unfinished(self) -> list[BatchKey]:
        return await on_disk("", self._unfinished)

    async def hold(self, key: BatchKey) -> DiskHeld | None:
        folder = BatchFolder(self.root / key.where)
        try:
            held = await on_disk(key.where, hold, folder, key.batch_id, locks=self._locks)
        except NotFound:
            return None
        return None if held is None else DiskHeld(held, FileStore(self.root, held.batch.tenant, self._limit))

    async def close(self) -> None:
        """Do nothing."""

    def _prepare(self) -> None:
        """Make the directory private, and read or choose its name among the cluster's stores."""
        make_private(self.root)
        if self._locks:
            return
        id_file = self.root / "store-id"
        try:
            make_private_folder(self.root)
            if not id_file.exists():
                candidate = id_file.with_name(f"store-id.{uuid.uuid4().hex}")
                write_whole(candidate, uuid.uuid4().hex)
                with contextlib.suppress(FileExistsError):
                    id_file.hardlink_to(candidate)  # the first of several routers chooses the name
                candidate.unlink()
            self.kind = f"batch-{id_file.read_text()}"
        except OSError as error:
            log.warning("batches of routers that died are not taken over: %s; --data-dir says where", error)
            self.kind = f"batch-{uuid.uuid4().hex}"

    def _unfinished(self) -> list[BatchKey]:
        keys = list[BatchKey]()
        for tenant in tenant_folders(self.root):
            folder = BatchFolder(tenant)
            for key in (BatchKey(tenant.name, batch_id) for batch_id in folder.ids()):
                if key not in self._ended:
                    with contextlib.suppress(NotFound):
                        (self._ended.add if folder.get(key.batch_id).status in ENDED else keys.append)(key)
        return keys
