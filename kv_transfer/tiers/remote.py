"""Remote tier: KV blocks in an object store that all nodes share, including nodes that start later.

An object holds GROUP consecutive blocks of a chain, aligned to GROUP, behind a header (`block_header.py`). Its name is
the hash of its last block. So a node that has a prompt knows the names of all objects that may exist and needs no
index. Objects become visible only when they are complete."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvferry.kv_transfer.tiers.object_eviction import keep_below
from kvferry.kv_transfer.tiers.object_format import packed, unpack
from kvferry.kv_transfer.tiers.object_groups import GROUP, REWRITE_AGE_S, Group, Known, in_chain
from kvferry.kv_transfer.tiers.object_store_loop import StoreLoop
from kvferry.kv_transfer.tiers.objects import CALL_S, Objects
from kvferry.kv_transfer.tiers.read_rates import ReadRates
from kvferry.kv_transfer.tiers.staging import Copies, Staging
from kvferry.protocol.errors import BlocksCorrupt, KvferryError, NotFound, TransferFailed, reason
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.tiers")

LOOKUPS, READS = 64, 16
"""Maximum number of lookups, and of reads, that wait or run; beyond that, the blocks are computed instead."""
LOOKUP_OBJECTS, AT_ONCE = 16, 4
"""Maximum number of objects in one lookup, and of objects read concurrently."""
RATE = 100e6
"""Expected rate of a read in bytes per second, until one was measured."""
HELD = 256 << 20
"""Maximum number of bytes that wait to be written; beyond that, nothing is written."""
OUTAGE_S = 10.0
"""Pause of calls to a store after an error, or of writes after a failed write or deletion, in seconds."""


class RemoteTier:
    """Blocks of one fingerprint in the shared store. Thread-safe; calls to the store run on the tier's own thread.

    known   record of the objects that this node found or wrote most recently
    """

    def __init__(
        self, objects: Objects, size: int, fingerprint: str, block_bytes: int, copies: Copies | None = None
    ) -> None:
        """Open the tier. Raises MemoryError.

        size: maximum size in bytes of all objects of the fingerprint, whichever node wrote them; 0: no bound. copies:
        copies blocks between device and host; None for blocks in host memory."""
        self._objects, self._fingerprint, self._block_bytes = objects, fingerprint, block_bytes
        self.folder = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self._pace, self.known = ReadRates(block_bytes, rate=RATE), Known()
        self._lookups, self._reads = threading.Semaphore(LOOKUPS), threading.Semaphore(READS)
        self._staging = Staging(copies, GROUP)
        self._held, self._lock = 0, threading.Lock()
        self._unavailable_until = self._read_only_until = 0.0
        self._warnings = RateLimitedLog(log, every_s=60.0)
        self._one_read, self._one_write = asyncio.Lock(), asyncio.Lock()
        self._tasks = StoreLoop("kv-tier-remote")
        if size:
            self._tasks.begin(keep_below(objects, self.folder, size, self.known.deleted))

    def close(self) -> None:
        """Stop reading and writing."""
        self._tasks.close()

    @property
    def unavailable(self) -> bool:
        """Return whether the store is not used at the moment, because a call failed."""
        return time.monotonic() < self._unavailable_until

    @property
    def block_s(self) -> float:
        """Return the recent read time per block, in seconds; 0 while the store does not answer."""
        return 0.0 if self.unavailable or self._pace.hangs else self._pace.seconds(1)

    def seconds(self, blocks: int) -> float:
        """Return the expected time to read this many blocks after the queued reads, in seconds."""
        return self._pace.seconds(blocks + self._pace.waiting)

    def lookup(self, hashes: Sequence[bytes], first: int, timeout_s: float, done: Callable[[int], None]) -> bool:
        """Call `done`, within `timeout_s`, with the number of blocks found from block `first` on, in whole groups.

        Return False, without calling `done`, if the chain has no such group or too many lookups wait."""
        groups = list(in_chain(self.folder, hashes, first, LOOKUP_OBJECTS))
        if not groups or self.unavailable or not self._lookups.acquire(blocking=False):
            return False
        self._tasks.begin(self._lookup(groups, first, timeout_s, done))
        return True

    def read(
        self, hashes: Sequence[bytes], first: int, blocks: Sequence[Any], done: Callable[[KvferryError | None], None]
    ) -> bool:
        """Read blocks of a chain from block `first` to its end, which must be the end of a group.

        The blocks belong to the tier until `done` is called with None or an error. False: too many reads wait; nothing
        is done."""
        groups = list(in_chain(self.folder, hashes, first))
        assert max(group.end for group in groups) == first + len(blocks), "a read must not end within a group"
        if self.unavailable or not self._reads.acquire(blocking=False):
            return False
        self._pace.enqueue(len(blocks))
        self._tasks.begin(self._read(groups, first, list(blocks), done))
        return True

    def has(self, group: Group) -> bool:
        """Return whether the group is already stored or being written, as far as this node knows."""
        return self.known.settled(group)

    def write(
        self, group: Group, blocks: Sequence[Any], copied: Callable[[], None], done: Callable[[bool], None]
    ) -> bool:
        """Write a group; return False, without writing, if it is already stored or too many bytes wait.

        Its blocks must not change until `copied` is called. `done` is called with True if they are in the store."""
        size = len(blocks) * self._block_bytes
        with self._lock:
            if time.monotonic() < self._read_only_until or self._held + size > HELD or not self.known.begin(group):
                return False
            self._held += size
        self._tasks.begin(self._write(group, list(blocks), size, copied, done))
        return True

    def drop(self, hashes: Collection[bytes]) -> None:
        """Delete the objects of these blocks and those behind them, since their content is wrong."""
        if names := self.known.drop(hashes):
            self._tasks.begin(self._delete(names))

    # On the tier's own thread.

    async def _lookup(self, groups: list[Group], first: int, timeout_s: float, done: Callable[[int], None]) -> None:
        """Look up the first group alone, then all other groups at once: usually all exist, or none."""
        found: list[Group] = []
        try:
            async with asyncio.timeout(timeout_s):
                for some in (groups[:1], groups[1:]):
                    there = await asyncio.gather(*map(self._exists, some))
                    count = there.index(False) if False in there else len(there)
                    found += some[:count]
                    if count < len(some):
                        break
        except TimeoutError:
            pass  # slow, but not an error
        except Exception as error:
            self._failed("looked up", error)
        finally:
            self._lookups.release()
            done(found[-1].end - first if found else 0)

    async def _exists(self, group: Group) -> bool:
        if self.known.exists(group):
            return True
        age_s = await self._objects.since(group.name)
        if age_s == math.inf:
            self.known.missing(group)
            return False
        self.known.found(group, age_s)
        return True

    async def _read(
        self, groups: list[Group], first: int, blocks: list[Any], done: Callable[[KvferryError | None], None]
    ) -> None:
        """Read the groups of one request concurrently; requests run one at a time. No block is written after `done`."""
        error: KvferryError | None = None
        began, slots = time.monotonic(), asyncio.Semaphore(AT_ONCE)

        async def bring(group: Group) -> None:
            async with slots:
                await self._bring(group, blocks[max(group.start - first, 0) : group.end - first])

        try:
            async with self._one_read, asyncio.timeout(CALL_S):
                began = time.monotonic()
                self._pace.begun()
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        tasks.create_task(bring(group))
        except BaseException as caught:  # also CancelledError on close: the blocks must be returned
            error = self._failed("read", caught)
        finally:
            self._reads.release()
            self._pace.ended(len(blocks), time.monotonic() - began if error is None else 0.0)
            done(error)

    async def _bring(self, group: Group, blocks: Sequence[Any]) -> None:
        """Read the last blocks of a group. Delete the object and raise BlocksCorrupt if it is corrupt."""
        try:
            content = await self._objects.get(group.name)
        except NotFound:
            self.known.gone(group)
            raise
        try:
            unpack(content, group, self._staging.to_fill(blocks), self._fingerprint, self._block_bytes)
            self._staging.filled(blocks)
        except BlocksCorrupt:
            self.known.gone(group)
            await self._delete([group.name])
            raise

    async def _write(
        self, group: Group, blocks: list[Any], size: int, copied: Callable[[], None], done: Callable[[bool], None]
    ) -> None:
        written = False
        try:
            content = packed(group, self._staging.brought(blocks), self._fingerprint, self._block_bytes)
            copied()
            async with self._one_write, asyncio.timeout(CALL_S):
                age_s = await self._objects.since(group.name)
                if age_s > REWRITE_AGE_S:
                    await self._objects.put(group.name, content)
                    age_s = 0.0
                written = self.known.written(group, age_s)
                if not written:
                    await self._objects.delete([group.name])
                    self.known.gone(group)
        except Exception as error:
            self.known.forget(group)
            self._failed("written", error, changing=True)
        finally:
            with self._lock:
                self._held -= size
            done(written)

    async def _delete(self, names: list[str]) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await self._objects.delete(names)
        except Exception as error:
            self._failed("deleted", error, changing=True)

    def _failed(self, what: str, error: BaseException, changing: bool = False) -> KvferryError:
        """Log an error and pause all calls to the store, or only writes and deletions if `changing`."""
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, KvferryError):
            self._read_only_until = time.monotonic() + OUTAGE_S
            if not changing:
                self._unavailable_until = self._read_only_until
            error = TransferFailed(f"{self._objects.url}: {reason(error)}")
        if not isinstance(error, NotFound):
            self._warnings.warning("blocks could not be %s: %s", what, error)
        return error
