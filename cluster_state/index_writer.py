"""Writer that keeps a node's rows in the block index equal to the blocks that it holds, in batches and refreshes."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvferry.cluster_state.index import ROW_TTL_S, BlockIndex
from kvferry.cluster_state.own_rows import OwnRows
from kvferry.cluster_state.row_loss_detector import RowLossDetector
from kvferry.protocol.errors import KvferryError, RegistryFull
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.index")

REWRITE_S = 5.0
"""Time over which a rewrite of all rows is spread, in seconds."""
MAX_BATCHES = 32
"""Maximum number of batches written before refresh and loss detection run."""
FULL_S = 2.0
"""Seconds between attempts to add rows to a full store."""


class IndexWriter:
    """Keeps one node's rows in the index equal to what the node holds, in batches, off the token path.

    snapshot     returns rows of all blocks the node holds now, parents before children; called on the asyncio loop
    flush_s      seconds for which changes are collected before they are written
    refresh_s    seconds between slow rewrites of all rows, which also compare them with the snapshot
    sample_s     seconds between samples of rows; if one is lost, all rows are slowly written again
    max_changes  maximum number of changed rows held for the next run; beyond it the snapshot replaces them

    Removals are written before additions, and parents before children, so the index errs towards fewer blocks. After a
    failure everything is written again. A full store is not a failure: removals continue and additions wait. Memory
    use: the node's rows, rows removed during an outage, and a batch. `note` may be called from any thread; everything
    else belongs to one asyncio loop. No method raises."""

    def __init__(
        self,
        index: BlockIndex,
        node_id: str,
        epoch: int,
        snapshot: Callable[[], Iterable[bytes]],
        *,
        flush_s: float = 0.05,
        refresh_s: float = ROW_TTL_S / 2,
        sample_s: float = 2.0,
        batch: int = 512,
        max_changes: int = 65536,
    ) -> None:
        self._index, self._node_id, self._epoch, self._snapshot = index, node_id, epoch, snapshot
        self._flush_s, self._refresh_s, self._batch, self._max_changes = flush_s, refresh_s, batch, max_changes
        self._loss_detector, self._refresh_rows = RowLossDetector(sample_s), batch
        self._add_again_at, self._full_log = -math.inf, RateLimitedLog(log, every_s=60.0)
        self._lock = threading.Lock()
        self._changes: list[tuple[Sequence[bytes], Sequence[bytes]]] = []
        self._changed_rows = 0
        self._compare, self._rewrite = True, False
        self._rows = OwnRows()
        self._stale: deque[bytes] = deque()  # rows to refresh
        self._failures = 0
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows in the index, as far as known."""
        return len(self._rows.held) - len(self._rows.new)

    @property
    def pending(self) -> int:
        """Return the number of additions and removals not written yet."""
        return len(self._rows.new) + len(self._rows.gone) + self._changed_rows

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Record a change of the node's blocks. Thread-safe.

        A row in both arguments is removed, because the order is unknown."""
        with self._lock:
            if self._compare:
                return
            self._changes.append((stored, removed))
            self._changed_rows += len(stored) + len(removed)
            if self._changed_rows > self._max_changes:
                self._changes, self._changed_rows, self._compare = [], 0, True

    def republish(self) -> None:
        """Write all rows again, because the index may have lost them."""
        self._rewrite = True

    async def start(self) -> None:
        """Start writing; the first batch contains what the node already holds."""
        self._task = asyncio.create_task(self._run(), name="index-writer")

    async def stop(self) -> None:
        """Finish the current batch and stop. Pending changes stay unwritten; the node's rows end with its lease."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def flush(self) -> bool:
        """Write at most MAX_BATCHES batches, and part of a refresh; return True if no addition remains."""
        try:
            await self._apply_changes()
            for _ in range(MAX_BATCHES):
                if self._stopping.is_set() or not (self._rows.gone or (self._rows.new and self._may_add())):
                    break
                await self._write()
                await self._apply_changes()
            if self._stopping.is_set():
                return False
            if self._may_add():
                await self._refresh_part()
            await self._check_losses()
            self._record_recovery()
        except RegistryFull as error:
            self._add_again_at = time.monotonic() + FULL_S
            self._full_log.warning("%d rows were not written to the block index: %s", len(self._rows.new), error)
            return False
        except Exception as error:
            self._failures = min(self._failures + 1, 10)
            if self._failures == 1:
                known = isinstance(error, KvferryError)
                log.warning("cannot write to the block index: %s", error, exc_info=None if known else error)
            return False
        return not self._rows.new

    async def _run(self) -> None:
        refresh_at = time.monotonic() + self._refresh_s
        while not self._stopping.is_set():
            await self.flush()
            if time.monotonic() >= refresh_at:
                refresh_at = time.monotonic() + self._refresh_s
                self._compare = True
                self._stale, self._refresh_rows = deque(self._rows.held), self._batch
            backoff_s = min(self._flush_s * 2.0**self._failures, 2.0) * random.uniform(0.5, 1.0)
            try:
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _write(self) -> None:
        """Write one batch.

        While the index is unavailable, removals fill the batch, so that few additions are tried: each tried addition
        must be removed later."""
        gone = list(islice(self._rows.gone, self._batch))
        new = list(islice(self._rows.new, self._batch - len(gone))) if self._may_add() else []
        for row in new:
            self._rows.new[row] = True
        await self._index.publish(self._node_id, self._epoch, new, gone)
        if self._record_recovery():
            return  # An addition that timed out may still take effect after this removal: remove it again.
        for row in gone:
            del self._rows.gone[row]
        for row in new:
            del self._rows.new[row]

    def _record_recovery(self) -> bool:
        """Record that the index answered; return whether it had failed before, so that everything is written again."""
        if self._failures == 0:
            return False
        log.info("the block index is available again")
        self._failures, self._rewrite = 0, True
        return True

    def _may_add(self) -> bool:
        """Return whether additions may be tried."""
        return time.monotonic() >= self._add_again_at

    async def _refresh_part(self) -> None:
        for begin in range(0, self._refresh_rows, self._batch):
            due = list(islice(self._stale, min(self._batch, self._refresh_rows - begin)))
            rows = [row for row in due if row in self._rows.held]
            if rows:
                await self._index.refresh(self._node_id, self._epoch, rows)
            for _ in due:
                self._stale.popleft()

    async def _check_losses(self) -> None:
        sample = [] if self._stale else self._loss_detector.sample(self._rows.held, self._rows.new)
        if sample and self._loss_detector.should_rewrite(
            await self._index.present(self._node_id, self._epoch, sample), len(sample)
        ):
            self._stale = deque(self._rows.held)
            self._refresh_rows = max(self._batch, math.ceil(len(self._rows.held) * self._flush_s / REWRITE_S))

    async def _apply_changes(self) -> None:
        """Apply the recorded changes, and compare with the snapshot if needed.

        Changes recorded during the call are applied after the snapshot, which may already contain them."""
        with self._lock:
            changes, self._changes, self._changed_rows = self._changes, [], 0
            compare, self._compare = self._compare or self._rewrite, False
        for stored, removed in changes:
            for row in stored:
                self._rows.add(row)
            for row in removed:
                self._rows.remove(row)
        if compare:
            await self._rows.compare(self._snapshot())
        if self._rewrite:
            self._rewrite = False
            await self._rows.rewrite()
