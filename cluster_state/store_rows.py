"""Rows of the block index for blocks in the object store that nodes share."""

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
"""Between two batches."""
BATCH = 512
"""Rows of one write."""
MOST = 8192
"""Rows that wait at most, while the index does not answer: the oldest are forgotten, for they are hints."""


class StoreRows:
    """Rows of groups that the node wrote, met or missed there, by the hash of their last block.

    Nobody owns them: each lives for its time, and is written again by anyone who meets the group then. `note` and
    `republish` from any thread, the rest on one asyncio loop. Nothing here raises.

    known   of all groups that the node knows to be there
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
        """Rows to be written or taken out."""
        return len(self._waiting)

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Groups are there, or not there any more. The last word counts."""
        with self._lock:
            for row, there in (*((each, False) for each in removed), *((each, True) for each in stored)):
                self._waiting[row] = there
                self._waiting.move_to_end(row)
            while len(self._waiting) > MOST:
                self._waiting.popitem(last=False)

    def republish(self) -> None:
        """The index may have lost rows: write again what is known."""
        self.note(self._known(), ())

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store-rows")

    async def stop(self) -> None:
        """Finish the batch under way; the rest stays unwritten."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def flush(self) -> None:
        """Write what waits. What fails waits on, unless there is a later word."""
        while self._waiting:
            with self._lock:
                batch = dict(islice(self._waiting.items(), BATCH))
                for row in batch:
                    del self._waiting[row]
            stored = [each for each, there in batch.items() if there]
            removed = [each for each, there in batch.items() if not there]
            try:
                await self._index.publish(ON_STORE, STORE_EPOCH, stored, removed)
            except Exception as error:
                self._again(batch, error)
                return
            self._failing = False

    def _again(self, batch: dict[bytes, bool], error: Exception) -> None:
        if not self._failing:
            known = isinstance(error, KvferryError)
            log.warning("rows of the store not written: %s", error, exc_info=None if known else error)
        self._failing = True
        with self._lock:
            for row, there in reversed(batch.items()):
                if row not in self._waiting and len(self._waiting) < MOST:
                    self._waiting[row] = there
                    self._waiting.move_to_end(row, last=False)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self.flush()
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
