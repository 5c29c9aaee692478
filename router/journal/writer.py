"""JournalWriter: writes the delivered outputs of all recorded streams to the store, every 250 ms in one call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from kvferry.cluster_state.journals import HEAD, Append, AppendOutcome, Journals
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.router.journal.journal_copy import CopyBudget
from kvferry.router.journal.open_journal import CloseMode, OpenJournal
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.journal")

WRITE_S = 0.25
"""Seconds between writes of delivered outputs."""
BEGIN_S = 0.02
"""Seconds within which a new journal is written, together with all others that begin in that time."""


class JournalWriter:
    """Writer of all journals of one router in one store.

    A journal whose store does not answer waits until it is too large or has expired. max_bytes: largest size of one
    journal."""

    def __init__(self, journals: Journals, owner: str, metrics: JournalMetrics, *, max_bytes: int) -> None:
        self._journals, self._owner, self._metrics, self._max_bytes = journals, owner, metrics, max_bytes
        self._copies = CopyBudget()
        self._open: dict[OpenJournal, None] = {}
        self._urgent: dict[OpenJournal, None] = {}
        self._soon = asyncio.Event()
        self._erased_at = journals.erased_at
        self._warnings = RateLimitedLog(log)

    def begin(self, journal: OpenJournal) -> bool:
        """Write this journal from now on; return False if it is too large already."""
        if journal.size > self._max_bytes:
            self._metrics.failures.labels("too_large").inc()
            journal.closed.set()
            return False
        journal.open(self._copies)
        self._open[journal] = None
        self._metrics.open.inc()
        self._prioritise(journal)
        return True

    def close(self, journal: OpenJournal, how: CloseMode) -> None:
        """Write the rest of a journal soon and then close it."""
        journal.close_mode = how
        journal.must_check = how is CloseMode.RELEASE  # a store that has lost it could not release it
        if how is CloseMode.END:
            journal.pending.end()
        else:
            self._prioritise(journal)

    def shorten(self, tenant: str, name: str, ttl_s: float) -> None:
        """Let an open journal of that name expire `ttl_s` seconds after its next writes."""
        for journal in self._open:
            if (journal.tenant, journal.name) == (tenant, name):
                journal.ttl_s = ttl_s

    def _prioritise(self, journal: OpenJournal) -> None:
        """Write a journal before all other journals."""
        self._urgent[journal] = None
        self._soon.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write until the end of the block, and then once more."""
        writing = asyncio.create_task(self._write(), name="journals")
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await self.flush()
            await self.flush()  # entries that waited behind an earlier entry of their journal

    async def _write(self) -> None:
        due = time.monotonic() + WRITE_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._soon.wait()
                    await asyncio.sleep(BEGIN_S)
            except TimeoutError:
                due = time.monotonic() + WRITE_S
                await self.flush()
            else:
                await self.flush(list(self._urgent))

    async def flush(self, only: Sequence[OpenJournal] | None = None) -> None:
        """Write the due entries of these journals, or of all journals. Never raises."""
        only = list(self._open) if only is None else only
        self._urgent.clear()
        self._soon.clear()
        now = time.monotonic()
        pairs = [(each, append) for each in only if each in self._open and (append := self._due(each, now))]
        try:
            await self._open_again([journal for journal, _ in pairs if journal.must_open])
            outcomes = await self._journals.append(self._owner, [append for _, append in pairs]) if pairs else []
        except RegistryUnavailable as error:
            self._failed(error, now)
            return
        for (journal, append), outcome in zip(pairs, outcomes, strict=True):
            if outcome is AppendOutcome.STORED:
                self._metrics.bytes.inc(journal.written(now))
                if journal.is_behind:
                    self._prioritise(journal)
            else:
                self._lost(journal, append, outcome)
        self._check_all()  # also journals that a call stored shortly before the data were lost
        await asyncio.gather(*(self._finish(each) for each in only if each in self._open and each.is_flushed))

    def _check_all(self) -> None:
        """Write all journals, also those without new outputs, once the store has lost its data."""
        if self._journals.erased_at != self._erased_at:
            self._erased_at = self._journals.erased_at
            self._warnings.warning("the store has lost its journals: they are written again")
            for journal in self._open:
                journal.must_check = True
                self._prioritise(journal)

    def _due(self, journal: OpenJournal, now: float) -> Append | None:
        append = journal.due(now)
        if journal.size > self._max_bytes:
            self._metrics.failures.labels("too_large").inc()
            journal.close_mode = CloseMode.DROP
            journal.written(now)
            journal.pending.take()
            return None
        return append

    def _failed(self, error: RegistryUnavailable, now: float) -> None:
        self._metrics.failures.labels("store").inc()
        self._warnings.warning("journals cannot be written, so streams cannot be resumed elsewhere: %s", error)
        for journal in [each for each in self._open if each.close_mode and now - each.written_at > each.ttl_s]:
            self._remove(journal)

    def _lost(self, journal: OpenJournal, append: Append, outcome: AppendOutcome) -> None:
        """Stop recording: another router owns the journal, or the store no longer has it."""
        in_use = append.number == HEAD and not journal.was_written
        if outcome is AppendOutcome.GONE and journal.written_at < self._journals.erased_at and journal.restart():
            self._prioritise(journal)
            return
        if outcome is AppendOutcome.LOST and not in_use:
            log.info("%s continues at another router", journal.name)
            journal.on_lost()
        else:
            reason = "name_in_use" if outcome is AppendOutcome.LOST else "evicted"
            self._metrics.failures.labels(reason).inc()
        self._remove(journal)

    async def _open_again(self, journals: Sequence[OpenJournal]) -> None:
        """Open journals with keys, which the store has lost. Raises RegistryUnavailable.

        The heads that are due for them change nothing then, or find another owner."""
        for each in journals:
            await self._journals.open(each.tenant, each.name, self._owner, each.head, key=each.key, ttl_s=each.ttl_s)
            each.must_open = False

    async def _finish(self, journal: OpenJournal) -> None:
        try:
            if journal.close_mode is CloseMode.RELEASE:
                await self._journals.release(journal.tenant, journal.name, self._owner, ttl_s=journal.ttl_s)
            elif journal.close_mode is CloseMode.DROP:
                await self._journals.drop(journal.tenant, journal.name, self._owner)
        except RegistryUnavailable as error:
            self._warnings.warning("%s is not released yet: %s", journal.name, error)
        else:
            self._remove(journal)

    def _remove(self, journal: OpenJournal) -> None:
        if self._open.pop(journal, journal) is None:
            self._metrics.open.dec()
        journal.shut()
