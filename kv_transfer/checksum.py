"""Block checksums, and the sampling of blocks to verify."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

ALGORITHM = "xxh3"
"""Both ends of a link take the same, or refuse each other: 64 bits at the speed of memory, where CRC32 goes at a
seventh of it."""
AT_ONCE = 64
"""Blocks whose checksums are told in one call."""
MAX_CHECKSUM = (1 << 63) - 1
UNVERIFIED = -1
"""Stands in Commit.checksums for a block whose checksum the sender did not take."""


def is_sampled(transfer: int, index: int, share: float) -> bool:
    """Return whether prompt block `index` of the transfer belongs to the verified share (0 none, 1 all).

    A function of its arguments only, so both sides choose the same blocks."""
    return share >= 1.0 or zlib.crc32(struct.pack("<QQ", transfer, index)) < share * 2**32


def digests(buffers: Sequence[Any]) -> list[int]:
    """64 bits of XXH3 over each contiguous buffer."""
    return [xxh3_64_intdigest(buffer) for buffer in buffers]


def checksum(buffer: Any) -> int:
    """0 to MAX_CHECKSUM: 63 bits of its digest."""
    return xxh3_64_intdigest(buffer) >> 1


class Checksums(Protocol):
    """Takes checksums for the link thread."""

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        """The checksum of the buffer; None: `done` is called with it on the link thread, later."""


class InlineChecksums:
    """At once: for blocks in the memory of this machine, which are sent from the caches that this brings them into, or
    were just received into them. A hand-over to another thread takes longer, and the library keeps the interpreter's
    lock."""

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        return checksum(buffer)


class ThreadedChecksums:
    """On one thread beside the link's, for blocks on a device, whose digests are waited for; a checksum overlaps
    the next block's way. What was given meanwhile is taken at one go and told at one go. The thread starts with the
    first block, by calling `prepare`, and ends with this object. digests: how they are taken where blocks lie."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        prepare: Callable[[], None] | None,
        digests: Callable[[Sequence[Any]], list[int]],
    ):
        self._submit, self._digests = submit, digests
        self._given: deque[tuple[Any, Callable[[int], None]]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-checksum", initializer=prepare)

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        self._given.append((buffer, done))
        if len(self._given) == 1:
            self._pool.submit(self._go)
        return None

    def _go(self) -> None:
        """Until nothing is left. What is taken out first cannot hold up what comes later, should it raise."""
        while self._given:
            blocks = [self._given.popleft() for _ in range(min(len(self._given), AT_ONCE))]
            values = self._digests([buffer for buffer, _ in blocks])
            taken = [(done, value >> 1) for (_, done), value in zip(blocks, values, strict=True)]
            self._submit(lambda taken=taken: _tell(taken))  # type: ignore[misc]


def _tell(taken: list[tuple[Callable[[int], None], int]]) -> None:
    for done, value in taken:
        done(value)


class Sums:
    """The checksums of one transfer's blocks. Runs on the link thread.

    by_index  what is known, by prompt block
    pending   checksums still being taken
    ended()   runs after each that was
    """

    def __init__(self, checksums: Checksums, ended: Callable[[], None]):
        self._checksums, self._ended = checksums, ended
        self.by_index: dict[int, int] = {}
        self.pending = 0

    def take(self, index: int, buffer: Any, done: Callable[[], None]) -> None:
        """done: called once the buffer is not looked at any more."""
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
