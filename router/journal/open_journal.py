"""OpenJournal: a journal that this router writes, with its next entry and a copy of what is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import Enum

from kvferry.cluster_state.journals import HEAD, Append
from kvferry.router.journal.journal_copy import CopyBudget, JournalCopy, joined
from kvferry.router.journal.recording import PendingEntry

OWNER_CHECK_S = 0.5
"""Seconds without new tokens after which a watched journal is written nevertheless, to detect another owner.

A client may have cancelled its work through another router."""


class CloseMode(Enum):
    """Last action of a router on a journal: mark it complete, release it to other routers, or delete it."""

    END = "end"
    RELEASE = "release"
    DROP = "drop"


def nothing() -> None:
    """Do nothing."""


class OpenJournal:
    """Journal that this router writes. `pending` collects the outputs.

    head       of the journal
    entries    entries that are written
    is_opened  whether the store has the head
    key        the client's idempotency key; empty: none
    watched    whether to check for another owner while no tokens come
    on_lost    called when another router owns the journal
    """

    def __init__(
        self, tenant: str, name: str, ttl_s: float, *, head: bytes, entries: Sequence[bytes] = (),
        is_opened: bool = False, key: str = "", watched: bool = False, on_lost: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        self.tenant, self.name, self.ttl_s, self.on_lost = tenant, name, ttl_s, on_lost
        self.key, self.pending = key, PendingEntry()
        self.close_mode: CloseMode | None = None
        self.size, self.written_at = len(head) + sum(map(len, entries)), time.monotonic()
        self._number, self._unsent = (len(entries), b"") if is_opened else (HEAD, head)
        self._begun: tuple[bytes, Sequence[bytes]] = (head, entries)
        self._copy: JournalCopy | None = None
        self._rest = list[bytes]()
        """Contents of the next entry: of a journal that is written again, or of the one that this one mirrors."""
        self._mirror: OpenJournal | None = None
        self._idle_s = min(OWNER_CHECK_S, ttl_s / 3) if watched else ttl_s / 3
        self.is_open = self.must_open = self.must_check = False
        """must_open: the store has lost the journal and its key. must_check: it may have lost the journal."""
        self.was_written = is_opened
        """Whether the store has had the journal; an owner that is found then continues it."""
        self.closed = asyncio.Event()
        """Set once nothing more will be written."""

    def open(self, budget: CopyBudget) -> None:
        """Write the journal from now on, and keep a copy if there is room."""
        self.is_open = True
        head, entries = self._begun
        self._copy, self._begun = JournalCopy.within(budget, head), (b"", ())
        for entry in entries:
            self._keep(entry)

    def shut(self) -> None:
        """Write nothing more."""
        self.is_open = False
        self._drop_copy()
        self.closed.set()
        if self._mirror is not None:
            self._mirror.close_mode, self._mirror.must_check = self.close_mode or CloseMode.RELEASE, True

    def mirror_to(self, other: OpenJournal) -> None:
        """Write all entries to another store as well, as soon as it answers, and close that journal with this one."""
        self._mirror, other.must_open = other, True

    def due(self, now: float) -> Append | None:
        """Return the entry to write now; None if there is none."""
        if not self._unsent and self._rest:
            self._unsent, self._rest = joined(self._rest), []
        if not self._unsent and self.pending:
            self._unsent = self.pending.take()
            self.size += len(self._unsent)
        if self._unsent or self.must_check or now - self.written_at >= self._idle_s:
            return Append(self.tenant, self.name, self._number, self._unsent, self.ttl_s)
        return None

    def written(self, now: float) -> int:
        """Record that the due entry is stored, and return its size in bytes."""
        entry, self._unsent, self.written_at, self.must_check = self._unsent, b"", now, False
        self.was_written = True
        if self._number == HEAD:
            self._number = 0
        elif entry:
            self._number += 1
            self._keep(entry)
            if self._mirror is not None:
                self._mirror.add(entry)
        return len(entry)

    def add(self, entry: bytes) -> None:
        """Add an entry of the journal that this one mirrors."""
        self._rest.append(entry)
        self.size += len(entry)

    def restart(self) -> bool:
        """Write the journal again from its copy; return False if there is none."""
        if self._copy is None:
            return False
        if self._number != HEAD:
            self._rest.insert(0, self._copy.whole(self._unsent))
            self._copy.clear()
        self._number, self._unsent, self.must_open = HEAD, self._copy.head, bool(self.key)
        return True

    @property
    def is_behind(self) -> bool:
        """Return whether the head is written, and an entry that was ready before is not."""
        return bool(self._rest)

    @property
    def head(self) -> bytes:
        """Return the head in the copy."""
        return self._copy.head if self._copy is not None else b""

    @property
    def is_flushed(self) -> bool:
        """Return whether the router closes the journal and everything is written."""
        return self.close_mode is not None and not (self._unsent or self._rest or self.pending)

    def _keep(self, entry: bytes) -> None:
        if self._copy is not None and not self._copy.add(entry):
            self._drop_copy()

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.release()
            self._copy = None
