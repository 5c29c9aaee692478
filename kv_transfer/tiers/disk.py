"""Disk tier: KV blocks stay available after eviction from the pool and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from kvferry.kv_transfer.tiers import disk_directories
from kvferry.kv_transfer.tiers.files import Folder, Group
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.kv_transfer.tiers.staging import Copies
from kvferry.protocol.errors import ConfigError, reason


class DiskTier(LocalTier[Group]):
    """Its directory is free for another process once its threads have ended."""

    def __init__(
        self,
        directory: Path,
        lock_file: IO[bytes],
        size: int,
        fingerprint: str,
        block_bytes: int,
        copies: Copies | None,
    ) -> None:
        self.directory, self._lock_file = directory, lock_file
        folder = Folder(directory, fingerprint, block_bytes, copies)
        super().__init__("disk", folder, size, block_bytes, lock_file.close)


def open_disk(
    path: str, name: str, size: int, fingerprint: str, block_bytes: int, copies: Copies | None = None
) -> DiskTier:
    """The tier of the first directory below the path that no other process has.

    copies: how blocks are reached that are not bytes of the host. Raises ConfigError."""
    directory, lock_file = disk_directories.take(path, name, fingerprint)
    try:
        return DiskTier(directory, lock_file, size, fingerprint, block_bytes, copies)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"cannot keep blocks in {directory}: {reason(error)}", param="kv_disk_path") from error
