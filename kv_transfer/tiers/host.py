"""Arena: rows of host memory that hold copies of a GPU's KV blocks, and open_host, a LocalTier over them."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.kv_transfer.tiers.staging import Copies
from kvferry.protocol.errors import ConfigError

RATE = 5e9
"""Expected rate of a read in bytes per second, until one was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class ArenaGroup:
    """Consecutive blocks of a chain in the arena. rows: indices of their rows."""

    name: str
    parent: bytes
    hashes: tuple[bytes, ...]
    rows: tuple[int, ...]
    size: int


class Arena:
    """Host memory in rows of one block each. Implements kv_transfer.tiers.group_store.Backing.

    The blocks have no checksums: host memory is as reliable as the pool."""

    most = 64

    def __init__(self, copies: Copies, rows: int, block_bytes: int) -> None:
        """Allocate the rows. Raises MemoryError."""
        self._copies, self._block_bytes = copies, block_bytes
        self._rows = copies.room(rows)
        self._free = list(range(rows))
        self._names = map(str, itertools.count())
        self._groups: set[ArenaGroup] = set()
        self._being_read: ArenaGroup | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return "the host's memory"

    def find(self) -> Iterable[ArenaGroup]:
        return ()

    def size_of(self, hashes: Sequence[bytes]) -> int:
        return len(hashes) * self._block_bytes

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> ArenaGroup:
        with self._lock:
            if len(self._free) < len(blocks):  # also while a removed group is still being read
                raise OSError(errno.ENOSPC, "there are no free rows")
            rows = tuple(self._free.pop() for _ in blocks)
        group = ArenaGroup(next(self._names), parent, tuple(hashes), rows, self.size_of(hashes))
        with self._lock:
            self._groups.add(group)
        try:
            self._copies.to_host(blocks, self._at(group.rows))
        except BaseException:
            self.remove(group)
            raise
        return group

    def read(self, group: ArenaGroup, first: int, blocks: Sequence[Any]) -> None:
        """Copy blocks to the device. Rows of a group that is removed meanwhile are freed after the copy."""
        with self._lock:
            if group not in self._groups:
                raise OSError(errno.ENOENT, "its memory was reused in the meantime")
            self._being_read = group
        try:
            self._copies.to_device(self._at(group.rows[first : first + len(blocks)]), blocks)
        finally:
            with self._lock:
                self._being_read = None
                if group not in self._groups:
                    self._free += group.rows

    def used(self, group: ArenaGroup) -> None:
        """Do nothing: the content does not survive the process."""

    def remove(self, group: ArenaGroup) -> None:
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
                if self._being_read is not group:
                    self._free += group.rows

    def _at(self, rows: Iterable[int]) -> list[Any]:
        return [self._rows[row] for row in rows]


def open_host(size: int, block_bytes: int, copies: Copies) -> LocalTier[ArenaGroup]:
    """Return the host memory tier, with all its memory allocated. Raises ConfigError."""
    rows = size // block_bytes
    if not rows:
        raise ConfigError(f"there is no room for a block of {block_bytes} bytes", param="kv_host_gib")
    try:
        arena = Arena(copies, rows, block_bytes)
    except MemoryError as error:
        raise ConfigError("out of host memory for blocks; lower --kv-host-gib", param="kv_host_gib") from error
    return LocalTier("host", arena, rows * block_bytes, block_bytes, rate=RATE)
