"""Remote tier: an object store that all nodes share, also those that start later.

An object has GROUP blocks of a chain, the first of which has a multiple of GROUP before it, behind a header that proves
them (`block_header.py`), and the name of the last one's hash. So who has a prompt knows the names of all that may be
there, and no index is asked. What is there was written whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvferry.kv_transfer.tiers.groups import ANEW_S, GROUP, Group, Known, in_chain
from kvferry.kv_transfer.tiers.object_format import packed, unpack
from kvferry.kv_transfer.tiers.objects import CALL_S, Objects
from kvferry.kv_transfer.tiers.read_rates import ReadRates
from kvferry.kv_transfer.tiers.staging import Copies, Staging
from kvferry.kv_transfer.tiers.store_eviction import keep_below
from kvferry.kv_transfer.tiers.store_loop import StoreLoop
from kvferry.protocol.errors import BlocksCorrupt, KvferryError, NotFound, TransferFailed, reason
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.tiers")

LOOKS, READS = 64, 16
"""That may wait or run at once; beyond them what is asked for is computed."""
LOOK, AT_ONCE = 16, 4
"""Objects that are looked for at once, and that are read at once."""
RATE = 100e6
"""Bytes a second that a read is expected to bring before there was one."""
HELD = 256 << 20
"""Bytes that may wait to be written; beyond them nothing is."""
OUT_S = 10.0
"""For which a store is left alone that did not answer, or not written to that took nothing."""


class RemoteTier:
    """Blocks of one kind. From any thread; the calls that it was given it makes on a thread of its own.

    known   the objects that this node met last
    """

    def __init__(
        self, objects: Objects, size: int, fingerprint: str, block_bytes: int, copies: Copies | None = None
    ) -> None:
        """size: bytes of all objects of the kind at most, whichever node wrote them; 0: no bound.

        copies: how blocks are reached that are not bytes of the host. Raises MemoryError."""
        self._objects, self._fingerprint, self._block_bytes = objects, fingerprint, block_bytes
        self.folder = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self._pace, self.known = ReadRates(block_bytes, rate=RATE), Known()
        self._looks, self._reads = threading.Semaphore(LOOKS), threading.Semaphore(READS)
        self._staging = Staging(copies, GROUP)
        self._held, self._lock = 0, threading.Lock()
        self._out_until = self._shut_until = 0.0
        self._trouble = RateLimitedLog(log, every_s=60.0)
        self._one_read, self._one_write = asyncio.Lock(), asyncio.Lock()
        self._tasks = StoreLoop("kv-tier-remote")
        if size:
            self._tasks.begin(keep_below(objects, self.folder, size, self.known.deleted))

    def close(self) -> None:
        """Stop reading and writing."""
        self._tasks.close()

    @property
    def out(self) -> bool:
        """Return whether it is left alone, since it did not answer."""
        return time.monotonic() < self._out_until

    @property
    def block_s(self) -> float:
        """Seconds that reading one block takes, as of late; 0 while the store does not answer."""
        return 0.0 if self.out or self._pace.hangs else self._pace.seconds(1)

    def seconds(self, blocks: int) -> float:
        """Return the expected seconds of reading so many blocks, behind the reads already queued."""
        return self._pace.seconds(blocks + self._pace.waiting)

    def look(self, hashes: Sequence[bytes], first: int, patience_s: float, done: Callable[[int], None]) -> bool:
        """Call `done`, within the patience, with how many blocks of the chain are there from its block `first` on, up
        to the end of a group. False: it is not called, for there can be none, or too much waits."""
        groups = list(in_chain(self.folder, hashes, first, LOOK))
        if not groups or self.out or not self._looks.acquire(blocking=False):
            return False
        self._tasks.begin(self._look(groups, first, patience_s, done))
        return True

    def read(
        self, hashes: Sequence[bytes], first: int, blocks: Sequence[Any], done: Callable[[KvferryError | None], None]
    ) -> bool:
        """Read a chain's blocks from its block `first` to its end, which is a group's, into these, which belong to the
        tier until `done` is called with None or with what went wrong. False: too much waits, and nothing is done."""
        groups = list(in_chain(self.folder, hashes, first))
        assert max(group.end for group in groups) == first + len(blocks), "a read ends within a group"
        if self.out or not self._reads.acquire(blocking=False):
            return False
        self._pace.asked(len(blocks))
        self._tasks.begin(self._read(groups, first, list(blocks), done))
        return True

    def has(self, group: Group) -> bool:
        """Return whether it need not be written, as far as is known."""
        return self.known.settled(group)

    def write(
        self, group: Group, blocks: Sequence[Any], copied: Callable[[], None], done: Callable[[bool], None]
    ) -> bool:
        """Write a group.

        Its blocks must stay as they are until `copied` is called; then `done` with whether they are there. False: too
        much waits, and nothing is done."""
        size = len(blocks) * self._block_bytes
        with self._lock:
            if time.monotonic() < self._shut_until or self._held + size > HELD or not self.known.begin(group):
                return False
            self._held += size
        self._tasks.begin(self._write(group, list(blocks), size, copied, done))
        return True

    def drop(self, hashes: Collection[bytes]) -> None:
        """Delete the objects of these blocks and those behind them, since their content is wrong."""
        if names := self.known.drop(hashes):
            self._tasks.begin(self._delete(names))

    # On the tier's own thread.

    async def _look(self, groups: list[Group], first: int, patience_s: float, done: Callable[[int], None]) -> None:
        """The first one alone, then the others at once: as a rule all are there, or none."""
        found: list[Group] = []
        try:
            async with asyncio.timeout(patience_s):
                for some in (groups[:1], groups[1:]):
                    there = await asyncio.gather(*map(self._there, some))
                    count = there.index(False) if False in there else len(there)
                    found += some[:count]
                    if count < len(some):
                        break
        except TimeoutError:
            pass  # it is slow: no more, no less
        except Exception as error:
            self._failed("looked for", error)
        finally:
            self._looks.release()
            done(found[-1].end - first if found else 0)

    async def _there(self, group: Group) -> bool:
        if self.known.there(group):
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
        """One piece after another, its groups side by side; nobody writes into a block once `done` is called."""
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
        except BaseException as caught:  # also where the tier is closed: the blocks go back
            error = self._failed("read", caught)
        finally:
            self._reads.release()
            self._pace.ended(len(blocks), time.monotonic() - began if error is None else 0.0)
            done(error)

    async def _bring(self, group: Group, blocks: Sequence[Any]) -> None:
        """The last blocks of a group. Raises BlocksCorrupt, and deletes what is not as it was written."""
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
                if age_s > ANEW_S:
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
        """Log it; a store that does not answer is left alone for a while, one that takes nothing is still read."""
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, KvferryError):
            self._shut_until = time.monotonic() + OUT_S
            if not changing:
                self._out_until = self._shut_until
            error = TransferFailed(f"{self._objects.url}: {reason(error)}")
        if not isinstance(error, NotFound):
            self._trouble.warning("blocks are not %s: %s", what, error)
        return error
