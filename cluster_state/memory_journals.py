"""Journals of requests in process memory: for requests that must not be stored, routers without Redis, and tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cluster_state.journals import HEAD, MAX_JOURNALS, Append, AppendOutcome, Journal
from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.protocol.errors import RegistryUnavailable

SWEEP_S = 1.0
"""Minimum time between two sweeps of a tenant's expired journals, in seconds."""


@dataclass(slots=True)
class _Record:
    head: bytes
    owner: str
    key: str
    created_at: float
    expires_at: float
    size: int
    entries: dict[int, bytes] = field(default_factory=dict)


class MemoryJournals:
    """Journals of one process. Implements cluster_state.journals.Journals.

    leases: leases of the owners. If `available` is False, every call raises RegistryUnavailable. clock: monotonic
    seconds."""

    def __init__(
        self,
        leases: MemoryRouterLeases | None = None,
        *,
        share: int = 64 * 2**20,
        max_journals: int = MAX_JOURNALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.available, self.erased_at = True, 0.0
        self._leases, self._share, self._max_journals, self._clock = leases, share, max_journals, clock
        self._records: dict[str, dict[str, _Record]] = {}
        self._sizes: dict[str, int] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._swept: dict[str, float] = {}

    async def close(self) -> None:
        """Do nothing."""

    async def open(self, tenant: str, name: str, owner: str, head: bytes, *, key: str = "", ttl_s: float) -> str:
        for known in (self._keys.get((tenant, key), ""), name):
            if (record := self._find(tenant, known)) is not None:
                return "" if known == name and record.owner == owner else known
        return "" if self._create(tenant, name, owner, head, key, ttl_s) else "!"

    async def append(self, owner: str, appends: list[Append]) -> list[AppendOutcome]:
        return [self._append(owner, append) for append in appends]

    async def read(self, tenant: str, name: str, since: int = 0) -> Journal | None:
        record = self._find(tenant, name)
        if record is None:
            return None
        entries = [record.entries[number] for number in range(since, len(record.entries))]
        is_owned = bool(record.owner) and (self._leases is None or await self._leases.alive(record.owner))
        return Journal(record.head, entries, record.owner, is_owned, self._clock() - record.created_at)

    async def claim(self, tenant: str, name: str, owner: str, *, ttl_s: float, by_force: bool = False) -> bool:
        found, record = await self.read(tenant, name), self._find(tenant, name)
        if found is None or record is None or (found.is_owned and found.owner != owner and not by_force):
            return False
        record.owner, record.expires_at = owner, self._clock() + ttl_s
        return True

    async def release(self, tenant: str, name: str, owner: str, *, ttl_s: float) -> bool:
        record = self._find(tenant, name)
        if record is None or record.owner != owner:
            return False
        record.owner, record.expires_at = "", self._clock() + ttl_s
        return True

    async def drop(self, tenant: str, name: str, owner: str) -> bool:
        record = self._find(tenant, name)
        if record is None or record.owner != owner:
            return False
        self._forget(tenant, name)
        return True

    def _append(self, owner: str, append: Append) -> AppendOutcome:
        record = self._find(append.tenant, append.name)
        if record is None and append.number == HEAD:
            created = self._create(append.tenant, append.name, owner, append.entry, "", append.ttl_s)
            return AppendOutcome.STORED if created else AppendOutcome.FULL
        if record is None:
            return AppendOutcome.GONE
        if record.owner != owner:
            return AppendOutcome.LOST
        record.expires_at = self._clock() + append.ttl_s
        if append.entry and append.number != HEAD and append.number not in record.entries:
            record.entries[append.number] = append.entry
            record.size += len(append.entry)
            self._sizes[append.tenant] += len(append.entry)
            return AppendOutcome.STORED if self._fits(append.tenant, append.name) else AppendOutcome.FULL
        return AppendOutcome.STORED

    def _create(self, tenant: str, name: str, owner: str, head: bytes, key: str, ttl_s: float) -> bool:
        self._sweep(tenant)
        now = self._clock()
        self._records[tenant][name] = _Record(head, owner, key, now, now + ttl_s, len(head))
        if key:
            self._keys[tenant, key] = name
        self._sizes[tenant] = self._sizes.get(tenant, 0) + len(head)
        return self._fits(tenant, name)

    def _find(self, tenant: str, name: str) -> _Record | None:
        """Return a journal that has not expired."""
        if not self.available:
            raise RegistryUnavailable("the store of journals is unavailable")
        record = self._records.get(tenant, {}).get(name)
        if record is not None and record.expires_at <= self._clock():
            self._forget(tenant, name)
            return None
        return record

    def _sweep(self, tenant: str) -> None:
        """Delete expired journals, at most once per SWEEP_S, since a tenant may have thousands."""
        records, now = self._records.setdefault(tenant, {}), self._clock()
        if now >= self._swept.get(tenant, 0.0) + SWEEP_S:
            self._swept[tenant] = now
            for name in list(records):
                self._find(tenant, name)

    def _forget(self, tenant: str, name: str) -> None:
        record = self._records[tenant].pop(name)
        self._sizes[tenant] -= record.size
        if self._keys.get((tenant, record.key)) == name:
            del self._keys[tenant, record.key]

    def _fits(self, tenant: str, name: str) -> bool:
        """Evict journals, the next to expire first, until the others fit.

        Delete this journal and return False if it alone is too large."""
        records = self._records[tenant]
        if records[name].size > self._share:
            self._forget(tenant, name)
            return False
        while self._sizes[tenant] > self._share or len(records) > self._max_journals:
            self._forget(tenant, min((record.expires_at, each) for each, record in records.items() if each != name)[1])
        return True
