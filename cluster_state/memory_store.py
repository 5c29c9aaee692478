"""Node registry and block index over dictionaries, for tests and simulations. Same contract as `redis_store`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cluster_state.index import ON_STORE, ROW_TTL_S, owner, store_hashes
from cluster_state.prefixes import longest
from cluster_state.registry import LEASE_S, Announced
from protocol.errors import RegistryUnavailable
from protocol.layout import STORE_GROUP
from protocol.lease import Foreign, NodeLease


class MemoryStore:
    """Registry and BlockIndex in one process. `available` False makes every call raise RegistryUnavailable, `flush`
    loses all data; `clock` tells seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = LEASE_S,
        row_ttl_s: float = ROW_TTL_S,
    ) -> None:
        self.available = True
        self.foreign: tuple[Foreign, ...] = ()
        self._clock, self._lease_s, self._row_ttl_s = clock, lease_s, row_ttl_s
        self._leases: dict[str, tuple[NodeLease, float]] = {}
        self._epochs: dict[str, int] = {}
        self._rows: dict[bytes, dict[str, int]] = {}
        self._row_ends: dict[bytes, float] = {}

    def flush(self) -> None:
        self._leases.clear()
        self._epochs.clear()
        self._rows.clear()
        self._row_ends.clear()

    async def close(self) -> None:
        """Nothing to close."""

    async def check(self) -> str:
        self._reach()
        return "memory"

    async def ping(self) -> None:
        self._reach()

    async def next_epoch(self, node_id: str, least: int) -> int:
        self._reach()
        known = self._live(node_id)
        last = max(self._epochs.get(node_id, 0), known.epoch if known else 0)
        self._epochs[node_id] = epoch = max(last + 1, least)
        return epoch

    async def announce(self, lease: NodeLease) -> Announced:
        self._reach()
        known = self._live(lease.node_id)
        if known is not None and known.epoch > lease.epoch:
            return Announced.FENCED
        self._leases[lease.node_id] = (lease, self._clock() + self._lease_s)
        return Announced.RENEWED if known is not None and known.epoch == lease.epoch else Announced.CREATED

    async def withdraw(self, node_id: str, epoch: int) -> None:
        self._reach()
        known = self._live(node_id)
        if known is not None and known.epoch == epoch:
            del self._leases[node_id]

    async def nodes(self) -> list[NodeLease]:
        self._reach()
        return [lease for node_id in list(self._leases) if (lease := self._live(node_id)) is not None]

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._reach()
        known = self._leases.get(owner(node_id))
        registered = known is not None and known[0].epoch == epoch
        for block_hash in removed:
            row = self._row(block_hash)
            if node_id in row and (registered or row[node_id] == epoch):
                del row[node_id]
        for block_hash in stored:
            row = self._rows[block_hash] = self._row(block_hash)
            row[node_id] = epoch if registered else max(epoch, row.get(node_id, epoch))
            self._row_ends[block_hash] = self._clock() + self._row_ttl_s

    async def refresh(self, node_id: str, epoch: int, hashes: Sequence[bytes]) -> None:
        await self.publish(node_id, epoch, hashes, ())
        for block_hash in hashes:
            for other in [
                n for n in self._rows[block_hash] if n not in (node_id, ON_STORE) and self._live(owner(n)) is None
            ]:
                del self._rows[block_hash][other]

    async def present(self, node_id: str, epoch: int, hashes: Sequence[bytes]) -> int:
        self._reach()
        return sum(self._row(block_hash).get(node_id) == epoch for block_hash in hashes)

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        self._reach()

        def held(node_id: str, hashes: Sequence[bytes], position: int) -> bool:
            return self._row(hashes[position]).get(node_id) == nodes[node_id]

        first = self._row(hashes[0]) if hashes else {}
        holders = [node_id for node_id, epoch in first.items() if nodes.get(node_id) == epoch]
        found = {node_id: longest(len(hashes), partial(held, node_id, hashes)) for node_id in holders}
        stored = store_hashes(hashes) if ON_STORE in nodes else ()
        if groups := longest(len(stored), partial(held, ON_STORE, stored)):
            found[ON_STORE] = groups * STORE_GROUP
        return found

    def _reach(self) -> None:
        if not self.available:
            raise RegistryUnavailable("the store is switched off")

    def _live(self, node_id: str) -> NodeLease | None:
        lease, ends = self._leases.get(node_id, (None, 0.0))
        return lease if ends > self._clock() else None

    def _row(self, block_hash: bytes) -> dict[str, int]:
        return self._rows.get(block_hash, {}) if self._row_ends.get(block_hash, 0.0) > self._clock() else {}
