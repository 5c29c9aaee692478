"""Writer of the block index's rows for blocks in the shared object store, on behalf of one node."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, BlockIndex
from kvferry.protocol.errors import KvferryError

log = logging.getLogger("kvferry.index")

FLUSH_S = 0.5
"""Seconds between two batches."""
BATCH = 512
"""Maximum number of rows in one write."""
MAX_WAITING = 8192
"""Maximum number of rows that wait while the index does not answer; the oldest are dropped, since rows are hints."""


class StoreRows:
    """Rows of groups in the store that this node wrote, found or did not find, by the hash of their last block.

    No node owns them: each row expires after its lifetime, and any node that finds the group writes it again. `note`
    and `republish` may be called from any thread; everything else belongs to one asyncio loop. No method raises.

    known   returns the rows of all groups known to exist
    """

    def __init__(self, index: BlockIndex, known: Callable[[], Sequence[bytes]]) -> None:
        self._index, self._known = index, known
        self._waiting: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = threading.Lock()
        self._stopping = asyncio.Event()
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """Return the number of rows to write or remove."""
        return len(self._waiting)

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Record groups that exist and groups that do not. The latest call for a row counts."""
        with self._lock:
            for row, exists in (*((each, False) for each in removed), *((each, True) for each in stored)):
                self._waiting[row] = exists
                self._waiting.move_to_end(row)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)

    def republish(self) -> None:
        """Write all known rows again, because the index may have lost them."""
        self.note(self._known(), ())

    async def start(self) -> None:
        """Start writing in the background."""
        self._task = asyncio.create_task(self._run(), name="store-rows")

    async def stop(self) -> None:
        """Finish the current batch and stop; the rest stays unwritten."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def flush(self) -> None:
        """Write all waiting rows. A failed batch waits again, unless `note` changed its rows meanwhile."""
        while self._waiting:
            with self._lock:
                batch = dict(islice(self._waiting.items(), BATCH))
                for row in batch:
                    del self._waiting[row]
            stored = [each for each, exists in batch.items() if exists]
            removed = [each for each, exists in batch.items() if not exists]
            try:
                await self._index.publish(ON_STORE, STORE_EPOCH, stored, removed)
            except Exception as error:
                self._requeue(batch, error)
                return
            self._failing = False

    def _requeue(self, batch: dict[bytes, bool], error: Exception) -> None:
        if not self._failing:
            known = isinstance(error, KvferryError)
            log.warning("cannot write rows of the shared store: %s", error, exc_info=None if known else error)
        self._failing = True
        with self._lock:
            for row, exists in reversed(batch.items()):
                if row not in self._waiting and len(self._waiting) < MAX_WAITING:
                    self._waiting[row] = exists
                    self._waiting.move_to_end(row, last=False)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self.flush()
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
