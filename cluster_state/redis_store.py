"""Node registry and block index in Redis or Valkey: implementation of `Registry` and `BlockIndex`, and its keys.

kvferry:<cluster>:nodes         hash  node id → epoch: the members
kvferry:<cluster>:node:<id>     string, the NodeLease in a `lease_seal`, expires with the lease
kvferry:<cluster>:epoch:<id>    string, the epoch last given to the node's processes, expires EPOCH_TTL_S after that
kvferry:<cluster>:b:<16 bytes>  hash  node id, or another name of `index` → epoch: holders of the block with this hash,
                                the first of a chain or the last of a store's group
kvferry:<cluster>:g:<8 bytes>   hash  8 bytes, name → epoch: the same for the blocks of a group (`protocol.index_rows`).
                                Both expire ROW_TTL_S after the last write
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from kvferry.cluster_state import redis_client, redis_scripts, row_scripts
from kvferry.cluster_state.direct_script import DirectScript
from kvferry.cluster_state.index import ON_STORE, ROW_TTL_S, store_hashes
from kvferry.cluster_state.journal_calls import RedisJournalScripts
from kvferry.cluster_state.lease_records import LeaseRecords
from kvferry.cluster_state.lease_seal import LeaseSeal
from kvferry.cluster_state.query_batching import Query, QueryBatcher
from kvferry.cluster_state.redis_check import checked, writers
from kvferry.cluster_state.redis_client import CALL_TIMEOUTS, Script, answered, sensible
from kvferry.cluster_state.redis_url import shown
from kvferry.cluster_state.registry import LEASE_S, Announced
from kvferry.cluster_state.seal import NO_SEAL, Seal
from kvferry.protocol.layout import STORE_GROUP
from kvferry.protocol.lease import IncompatibleLease, NodeLease

log = logging.getLogger("kvferry.redis")

EPOCH_TTL_S = 7 * 86_400.0
"""Seconds for which a node's last epoch is kept: far longer than a clock is set back."""
CHECK_S = 2.0
"""Maximum time of each step of `check`, in seconds."""


class RedisStore:
    """Store of one cluster. Implements cluster_state.registry.Registry and cluster_state.index.BlockIndex.

    Connects on first use and reconnects by itself; belongs to one asyncio loop.

    url            see `redis_url`; raises ConfigError if it is invalid
    timeout_s      maximum time to connect and for each answer, except lookups
    lookup_s       maximum time of a longest_prefix call, because a request waits for it
    password_file  contains the password, read at each connection; empty: the URL's password is used
    open_to        who can write to the server without a password, as `check` found (`redis_check.writers`)
    records        the leases as they are written
    journals       scripts of routers' journals, for routers that cannot reach the server
    seal           signs this process's leases and verifies those of other processes
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        timeout_s: float = 1.0,
        lookup_s: float = 0.25,
        lease_s: float = LEASE_S,
        row_ttl_s: float = ROW_TTL_S,
        password_file: str = "",
        seal: Seal = NO_SEAL,
    ) -> None:
        self.incompatible: tuple[IncompatibleLease, ...] = ()
        self.open_to = ""
        self._seal = LeaseSeal(cluster, seal, lease_s)
        self._url, self._shown, self._prefix = url, shown(url), f"kvferry:{cluster}:"
        prefix = self._prefix
        self._members, self._leases, self._rows = prefix + "nodes", prefix + "node:", [prefix + "b:", prefix + "g:"]
        self._epochs = prefix + "epoch:"
        self._lookups = QueryBatcher(self._longest_prefixes, lookup_s, self._send_prefixes)
        self._lease_ms, self._row_ttl_ms = int(lease_s * 1000), int(row_ttl_s * 1000)
        self._client, self._limit_s = redis_client.connected(url, timeout_s, password_file), CALL_TIMEOUTS * timeout_s

        def script(text: str) -> Script:
            return Script(self._client, text, timeout_s)

        self._announce, self._withdraw = script(redis_scripts.ANNOUNCE), script(redis_scripts.WITHDRAW)
        self.records = LeaseRecords(script(redis_scripts.NODES), [self._members, self._leases], self._seal)
        self._publish, self._refresh = script(row_scripts.PUBLISH), script(row_scripts.REFRESH)
        self._longest = DirectScript(self._client, row_scripts.LONGEST_PREFIX, timeout_s)
        self._epoch, self._present = script(redis_scripts.EPOCH), script(row_scripts.PRESENT)
        self._holders = script(row_scripts.HOLDERS)
        self.journals = RedisJournalScripts(self._client, cluster, timeout_s)

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await redis_client.close(self._client)

    async def check(self) -> str:
        """Check the server; return its name and version, and log a warning if anyone can write without a password.

        Raises ConfigError for an unsuitable server, RegistryRefuses for one that rejects this process for now, and
        RegistryUnavailable if it does not answer."""
        described = await checked(self._client, self._prefix, self._shown, CHECK_S)
        self.open_to = await writers(self._url, self._prefix, CHECK_S)
        if self.open_to:
            log.warning("Redis at %s accepts commands without a password from %s", self._shown, self.open_to)
        return described

    async def ping(self) -> None:
        """Raise RegistryUnavailable unless the server answers."""
        await answered(self._client, self._client.ping(), self._limit_s)

    async def next_epoch(self, node_id: str, least: int) -> int:
        keys = [self._epochs + node_id, self._members]
        answer = await self._epoch.run(keys, [node_id, least, int(EPOCH_TTL_S * 1000)])
        with sensible():
            return int(answer)

    async def announce(self, lease: NodeLease) -> Announced:
        keys, record = [self._members, self._leases + lease.node_id], self._seal.sealed(lease)
        self.records.announced = record
        answer = await self._announce.run(keys, [lease.node_id, lease.epoch, record, self._lease_ms])
        with sensible():
            return Announced(answer.decode())

    async def withdraw(self, node_id: str, epoch: int) -> None:
        self.records.announced = b""
        await self._withdraw.run([self._members, self._leases + node_id], [node_id, epoch])

    async def nodes(self) -> list[NodeLease]:
        """Return all live leases that this process may use.

        Leases of another wire version, or without the seal of this cluster, are in `incompatible` afterwards."""
        leases, self.incompatible = self.records.read(await self.records.fetch())
        return leases

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        args = [node_id, epoch, self._row_ttl_ms, _packed_rows(stored, node_id), _packed_rows(removed, node_id)]
        await self._publish.run([*self._rows, self._members], args)

    async def refresh(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> None:
        args = [node_id, epoch, self._row_ttl_ms, _packed_rows(rows, node_id)]
        await self._refresh.run([*self._rows, self._members, self._leases], args)

    async def present(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> int:
        answer = await self._present.run(self._rows, [node_id, epoch, _packed_rows(rows, node_id)])
        with sensible():
            return int(answer)

    async def holders(self, rows: Sequence[bytes], nodes: Mapping[str, int]) -> list[frozenset[str]]:
        if not rows or not nodes:
            return [frozenset()] * len(rows)
        answer = await self._holders.run(self._rows, [b"".join(rows), *nodes])
        with sensible():
            live = [(name, str(epoch).encode()) for name, epoch in nodes.items()]
            return [
                frozenset(name for (name, epoch), found in zip(live, packed_leases, strict=True) if found == epoch)
                for packed_leases in answer
            ]

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        if not hashes or not nodes:
            return {}
        stored = store_hashes(hashes) if ON_STORE in nodes and len(hashes) >= STORE_GROUP else ()
        answer = await self._lookups.ask((b"".join(hashes), b"".join(stored)))
        with sensible():
            packed_leases = zip(answer[::3], answer[1::3], answer[2::3], strict=True)
            found = ((node.decode(), epoch.decode(), int(length)) for node, epoch, length in packed_leases)
            held = {node: length for node, epoch, length in found if str(nodes.get(node)) == epoch}
        if ON_STORE in held:
            held[ON_STORE] *= STORE_GROUP
        return held

    async def _longest_prefixes(self, queries: Sequence[Query]) -> Any:
        """Return one answer per question, which holds a chain's hashes and those of its groups in the shared store."""
        return await self._longest.run(self._rows, [ON_STORE, *chain.from_iterable(queries)])

    def _send_prefixes(self, queries: Sequence[Query]) -> asyncio.Future[Any] | None:
        """Return a future of the answers of `_longest_prefixes`; None if a connection must be made first."""
        return self._longest.call(self._rows, (ON_STORE.encode(), *chain.from_iterable(queries)))


def _packed_rows(rows: Sequence[bytes], name: str) -> bytes:
    """Return the rows as the scripts read them, each followed by the name."""
    return name.encode().join((*rows, b""))
