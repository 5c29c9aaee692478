"""In-memory node registry and block index with the contract of `redis_store`, for tests and simulations.

Leases and rows expire by a given clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvferry.cluster_state.index import ON_STORE, ROW_TTL_S, owner, store_hashes
from kvferry.cluster_state.prefix_search import longest
from kvferry.cluster_state.registry import LEASE_S, Announced
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.index_rows import alone, key_and_tag, rows_of
from kvferry.protocol.layout import STORE_GROUP
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.wire import pack, unpack


class MemoryRows:
    """Rows of a block index in one process, by key, and the expiry of each key.

    If `available` is False, every call raises RegistryUnavailable. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.available = True
        self._clock = clock
        self._rows: dict[bytes, dict[tuple[str, bytes], int]] = {}
        self._expires_at: dict[bytes, float] = {}

    async def present(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> int:
        self._check_available()
        return sum(self._epoch(row, node_id) == epoch for row in rows)

    async def holders(self, rows: Sequence[bytes], nodes: Mapping[str, int]) -> list[frozenset[str]]:
        self._check_available()
        return [frozenset(name for name, epoch in nodes.items() if self._epoch(row, name) == epoch) for row in rows]

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        self._check_available()

        def held(node_id: str, rows: Sequence[bytes], position: int) -> bool:
            return self._epoch(rows[position], node_id) == nodes[node_id]

        chain = rows_of(hashes)
        first = self._fields(key_and_tag(chain[0])[0]) if chain else {}
        holders = [name for (name, _), epoch in first.items() if nodes.get(name) == epoch]
        found = {node_id: longest(len(chain), partial(held, node_id, chain)) for node_id in holders}
        stored = [alone(each) for each in store_hashes(hashes)] if ON_STORE in nodes else ()
        if groups := longest(len(stored), partial(held, ON_STORE, stored)):
            found[ON_STORE] = groups * STORE_GROUP
        return found

    def _check_available(self) -> None:
        if not self.available:
            raise RegistryUnavailable("the store is unavailable")

    def _epoch(self, row: bytes, name: str) -> int | None:
        key, tag = key_and_tag(row)
        return self._fields(key).get((name, tag))

    def _fields(self, key: bytes) -> dict[tuple[str, bytes], int]:
        return self._rows.get(key, {}) if self._expires_at.get(key, 0.0) > self._clock() else {}


class MemoryLeaseRecords:
    """Leases of a MemoryStore as bytes; see `lease_records.LeaseRecords`."""

    def __init__(self, store: MemoryStore) -> None:
        self.announced = b""
        self._store = store

    async def fetch(self) -> list[bytes]:
        """Return all live leases."""
        return [pack(lease) for lease in await self._store.nodes()]

    def unsealed(self, records: Sequence[bytes]) -> list[NodeLease]:
        """Return the leases in these records."""
        return [unpack(record) for record in records]


class NoJournalScripts:
    """Scripts of a store that holds no journals. Implements journal_calls.JournalScripts."""

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> tuple[bytes, ...]:
        """Raise RegistryUnavailable."""
        raise RegistryUnavailable("a store in memory holds no journals")


class MemoryStore(MemoryRows):
    """Store in one process. Implements cluster_state.registry.Registry and cluster_state.index.BlockIndex.

    If `available` is False, every call raises RegistryUnavailable. clock: monotonic seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = LEASE_S,
        row_ttl_s: float = ROW_TTL_S,
    ) -> None:
        super().__init__(clock)
        self.incompatible: tuple[IncompatibleLease, ...] = ()
        self.records = MemoryLeaseRecords(self)
        self.journals = NoJournalScripts()
        self._lease_s, self._row_ttl_s = lease_s, row_ttl_s
        self._leases: dict[str, tuple[NodeLease, float]] = {}
        self._epochs: dict[str, int] = {}

    def flush(self) -> None:
        """Delete all data."""
        self._leases.clear()
        self._epochs.clear()
        self._rows.clear()
        self._expires_at.clear()

    async def close(self) -> None:
        """Do nothing."""

    async def check(self) -> str:
        """Return the name of this store."""
        self._check_available()
        return "memory"

    async def ping(self) -> None:
        """Raise RegistryUnavailable if the store is unavailable."""
        self._check_available()

    async def next_epoch(self, node_id: str, least: int) -> int:
        self._check_available()
        known = self._live(node_id)
        last = max(self._epochs.get(node_id, 0), known.epoch if known else 0)
        self._epochs[node_id] = epoch = max(last + 1, least)
        return epoch

    async def announce(self, lease: NodeLease) -> Announced:
        self._check_available()
        known = self._live(lease.node_id)
        if known is not None and known.epoch > lease.epoch:
            return Announced.FENCED
        self._leases[lease.node_id] = (lease, self._clock() + self._lease_s)
        return Announced.RENEWED if known is not None and known.epoch == lease.epoch else Announced.CREATED

    async def withdraw(self, node_id: str, epoch: int) -> None:
        self._check_available()
        known = self._live(node_id)
        if known is not None and known.epoch == epoch:
            del self._leases[node_id]

    async def nodes(self) -> list[NodeLease]:
        self._check_available()
        return [lease for node_id in list(self._leases) if (lease := self._live(node_id)) is not None]

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._check_available()
        known = self._leases.get(owner(node_id))
        registered = known is not None and known[0].epoch == epoch
        for key, tag in map(key_and_tag, removed):
            fields = self._fields(key)
            if registered or fields.get((node_id, tag)) == epoch:
                fields.pop((node_id, tag), None)
        for key, tag in map(key_and_tag, stored):
            fields = self._rows[key] = self._fields(key)
            fields[node_id, tag] = epoch if registered else max(epoch, fields.get((node_id, tag), epoch))
            self._expires_at[key] = self._clock() + self._row_ttl_s

    async def refresh(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> None:
        await self.publish(node_id, epoch, rows, ())
        for key in {key_and_tag(row)[0] for row in rows}:
            fields = self._rows[key]
            self._rows[key] = {each: fields[each] for each in fields if fields[each] >= self._least(each[0], node_id)}

    def _live(self, node_id: str) -> NodeLease | None:
        lease, ends = self._leases.get(node_id, (None, 0.0))
        return lease if ends > self._clock() else None

    def _least(self, name: str, own: str) -> float:
        """Return the lowest valid epoch of rows under a name; infinite if all are void."""
        lease = self._live(owner(name))
        if lease is not None:
            return lease.epoch
        return 0 if name in (own, ON_STORE) else math.inf
