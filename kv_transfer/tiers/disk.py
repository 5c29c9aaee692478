"""Disk tier: a local tier over files, in a directory that it locks against other processes."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from kvferry.kv_transfer.tiers import disk_directories
from kvferry.kv_transfer.tiers.files import Folder, Group
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.kv_transfer.tiers.staging import Copies
from kvferry.protocol.errors import ConfigError, reason


class DiskTier(LocalTier[Group]):
    """Tier of blocks in one directory, locked against other processes until the tier's threads end."""

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
    """Open the tier in the first directory under the path that no other process uses.

    copies: copies blocks between device and host; None for blocks in host memory. Raises ConfigError."""
    directory, lock_file = disk_directories.take(path, name, fingerprint)
    try:
        return DiskTier(directory, lock_file, size, fingerprint, block_bytes, copies)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"cannot keep blocks in {directory}: {reason(error)}", param="kv_disk_path") from error
