"""XXH3 checksums of KV blocks, computed on the link thread or on a thread of their own, and the choice of blocks."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

ALGORITHM = "xxh3"
"""Checksum algorithm of a link: both ends must use the same, or they refuse each other.

XXH3 gives 64 bits at the speed of memory; CRC32 has a seventh of that speed."""
AT_ONCE = 64
"""Maximum number of blocks whose checksums are computed and reported in one call."""
MAX_CHECKSUM = (1 << 63) - 1
"""Largest checksum: 63 bits."""
UNVERIFIED = -1
"""Entry of Commit.checksums for a block whose checksum the sender did not take."""


def is_sampled(transfer: int, index: int, share: float) -> bool:
    """Return whether prompt block `index` of the transfer belongs to the verified share (0 none, 1 all).

    The result depends only on the arguments, so both sides choose the same blocks."""
    return share >= 1.0 or zlib.crc32(struct.pack("<QQ", transfer, index)) < share * 2**32


def digests(buffers: Sequence[Any]) -> list[int]:
    """Return the 64-bit XXH3 digest of each contiguous buffer."""
    return [xxh3_64_intdigest(buffer) for buffer in buffers]


def checksum(buffer: Any) -> int:
    """Return the buffer's checksum: its digest shifted to 63 bits, 0 to MAX_CHECKSUM."""
    return xxh3_64_intdigest(buffer) >> 1


class Checksums(Protocol):
    """Computes block checksums for the link thread."""

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        """Return the buffer's checksum, or None; then `done` is called with it later, on the link thread."""


class InlineChecksums:
    """Checksums computed on the link thread, for blocks in host memory. Implements kv_transfer.checksum.Checksums.

    The blocks are in the CPU caches: they were just received, or the checksum loads them for the send. A hand-over to
    another thread would take longer, and the library holds the GIL anyway."""

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        return checksum(buffer)


class ThreadedChecksums:
    """Checksums computed on their own thread, for blocks on a device. Implements kv_transfer.checksum.Checksums.

    Digests on a device must be waited for; on a thread they overlap the transfer of the next block. Blocks that arrive
    in the meantime are computed and reported in one batch. The thread starts with the first block, by calling
    `prepare`, and ends with this object. digests: computes the digests where the blocks are."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        prepare: Callable[[], None] | None,
        digests: Callable[[Sequence[Any]], list[int]],
    ):
        self._submit, self._digests = submit, digests
        self._queue: deque[tuple[Any, Callable[[int], None]]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-checksum", initializer=prepare)

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        self._queue.append((buffer, done))
        if len(self._queue) == 1:
            self._pool.submit(self._compute)
        return None

    def _compute(self) -> None:
        """Compute until no block is left. A batch leaves the queue first, so its error does not block later ones."""
        while self._queue:
            blocks = [self._queue.popleft() for _ in range(min(len(self._queue), AT_ONCE))]
            values = self._digests([buffer for buffer, _ in blocks])
            taken = [(done, value >> 1) for (_, done), value in zip(blocks, values, strict=True)]
            self._submit(lambda taken=taken: _report(taken))  # type: ignore[misc]


def _report(taken: list[tuple[Callable[[int], None], int]]) -> None:
    for done, value in taken:
        done(value)


class Sums:
    """Checksums of one transfer's blocks. Runs on the link thread.

    by_index  known checksums, by prompt block index
    pending   checksums in progress
    ended()   runs after each checksum that was computed asynchronously
    """

    def __init__(self, checksums: Checksums, ended: Callable[[], None]):
        self._checksums, self._ended = checksums, ended
        self.by_index: dict[int, int] = {}
        self.pending = 0

    def take(self, index: int, buffer: Any, done: Callable[[], None]) -> None:
        """Take the checksum of a block; call `done` once the buffer is not read any more."""
        value = self._checksums.take(buffer, lambda value: self._taken(index, value, done))
        if value is None:
            self.pending += 1
        else:
            self.by_index[index] = value
            done()

    def _taken(self, index: int, value: int, done: Callable[[], None]) -> None:
        self.by_index[index] = value
        self.pending -= 1
        done()
        self._ended()
