"""Interfaces of the stores of clients' files and batches, which disk_store and redis_store implement.

One router at a time holds a batch. Once another holds it, all writes of the earlier holder fail or have no effect,
even those of a process that hung for a while. So each row has one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from kvferry.router.batch.batch import Batch
from kvferry.router.batch.files import Readable, StoredFile
from kvferry.router.batch.rows import Row

PIECE = 2**18
"""Size of the pieces in which a file is read, in bytes."""


class LostBatch(Exception):
    """Another router holds the batch now."""


class BatchKey(NamedTuple):
    """Key of a batch: the name of its tenant's part of the store, and the batch's id."""

    where: str
    batch_id: str

    @classmethod
    def parse(cls, name: str) -> BatchKey:
        """Return the key of this name."""
        where, _, batch_id = name.partition(":")
        return cls(where, batch_id)

    @property
    def name(self) -> str:
        """Return the key as one name, unique in the cluster."""
        return f"{self.where}:{self.batch_id}"


class TenantFiles(Protocol):
    """Files of one tenant. Calls raise DiskFailed, or RegistryUnavailable if Redis does not answer."""

    async def add(self, content: Readable, filename: str, purpose: str) -> StoredFile:
        """Store the rest of `content` as a file; raise RequestTooLarge if the tenant's limit is exceeded."""

    async def all(self) -> list[StoredFile]:
        """Return all files, newest first."""

    async def get(self, file_id: str, param: str = "file_id") -> StoredFile:
        """Return a file's description; raise NotFound."""

    async def open(self, file_id: str) -> tuple[AsyncIterator[bytes], int]:
        """Return a file's pieces and its size in bytes; raise NotFound."""

    async def delete(self, file_id: str) -> None:
        """Delete a file; raise NotFound."""

    async def remaining(self) -> int:
        """Return the remaining bytes of the tenant's limit."""


class TenantBatches(Protocol):
    """Batches of one tenant. Calls raise OSError or DiskFailed, or RegistryUnavailable if Redis does not answer."""

    async def create(self, batch: Batch) -> None:
        """Store a new batch."""

    async def get(self, batch_id: str) -> Batch:
        """Return a batch as last saved, or as cancelling if that was requested; raise NotFound."""

    async def all(self) -> list[Batch]:
        """Return all readable batches, newest first."""

    async def forget(self, batch_id: str) -> None:
        """Delete an ended batch; its input and output files stay."""

    async def cancel(self, batch_id: str) -> None:
        """Ask the router that holds the batch to cancel it."""


class HeldBatch(Protocol):
    """Batch that this process holds: no other process changes `batch` or answers its rows.

    Calls raise LostBatch once another process holds it, and OSError or DiskFailed for a disk; they wait for Redis."""

    batch: Batch

    def answered(self, row: Row) -> bool:
        """Return whether the row has an answer."""

    async def cancelling(self) -> bool:
        """Return whether a cancellation was requested."""

    async def save(self) -> None:
        """Save the batch."""

    async def input(self) -> AsyncIterator[bytes]:
        """Return the pieces of the input file; raise NotFound."""

    async def write(self, row: Row, line: bytes, *, ok: bool) -> None:
        """Write the answer of a row: to the output if `ok`, else to the errors. Raises RequestTooLarge."""

    async def publish(self, *, ok: bool) -> str | None:
        """Store the output or the errors as a file, once; return its id, or None if empty. Raises RequestTooLarge."""

    async def clear(self) -> None:
        """Delete the written answers, after the batch has ended."""

    async def release(self) -> None:
        """Stop holding the batch. Never raises."""


class BatchStore(Protocol):
    """Files and batches of all tenants.

    kind: kind of this store's batches among the tasks that routers own; equal for routers that share the store."""

    kind: str

    async def start(self) -> None:
        """Prepare the store; call it before batches are created or held. Further calls have no effect."""

    def files(self, tenant: str) -> TenantFiles:
        """Return a tenant's files."""

    def batches(self, tenant: str) -> TenantBatches:
        """Return a tenant's batches."""

    def key(self, batch: Batch) -> BatchKey:
        """Return the key of a batch."""

    async def unfinished(self) -> list[BatchKey]:
        """Return the batches that have not ended."""

    async def hold(self, key: BatchKey) -> HeldBatch | None:
        """Hold a batch; None if another process holds it, or if it has ended or does not exist."""

    async def close(self) -> None:
        """Close connections. Never raises."""
