"""CRC32 of blocks, and the choice of those that are verified."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

UNVERIFIED = -1
"""Stands in Commit.checksums for a block whose checksum the sender did not take."""


def is_sampled(transfer: int, index: int, share: float) -> bool:
    """Whether prompt block `index` of the transfer belongs to the verified share (0 none, 1 all). A function of its
    arguments only, so both sides choose the same blocks."""
    return zlib.crc32(struct.pack("<QQ", transfer, index)) < share * 2**32


class Checksums(Protocol):
    """Takes checksums for the link thread."""

    def take(self, buffer: Any, done: Callable[[int], None]) -> None:
        """Call done(CRC32 of the buffer) on the link thread, later."""


class InlineChecksums:
    """On the calling thread: deterministic; `submit` is the link's."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]):
        self._submit = submit

    def take(self, buffer: Any, done: Callable[[int], None]) -> None:
        value = zlib.crc32(buffer)
        self._submit(lambda: done(value))


class ThreadedChecksums:
    """On one thread beside the link's (crc32 releases the GIL): a block's checksum overlaps the next block's way, which
    on two cores doubles the speed of a verified ship. The thread starts with the first block and ends with this object.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]):
        self._submit = submit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-checksum")

    def take(self, buffer: Any, done: Callable[[int], None]) -> None:
        def finished(future: Future[int]) -> None:
            if not future.cancelled():
                self._submit(lambda: done(future.result()))

        self._pool.submit(zlib.crc32, buffer).add_done_callback(finished)
