"""Node registry and block index in Redis or Valkey.

kvferry:<cluster>:nodes         hash  node id → epoch: the members
kvferry:<cluster>:node:<id>     string, the packed NodeLease, expires with the lease
kvferry:<cluster>:b:<16 bytes>  hash  node id → epoch: who holds the block, expires ROW_TTL_S after the last write
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from cluster_state import redis_client, redis_scripts
from cluster_state.index import ROW_TTL_S
from cluster_state.redis_client import run, translated
from cluster_state.registry import LEASE_S, Announced
from protocol.errors import RegistryUnavailable
from protocol.lease import NodeLease
from protocol.wire import WireError, pack, unpack

log = logging.getLogger("kvferry.redis")


class RedisStore:
    """Registry and BlockIndex of one cluster. Connects on first use, reconnects by itself; belongs to one asyncio loop.

    url            redis://, rediss:// or unix:// as the redis package reads it. Raises ConfigError if it cannot
    timeout_s      bound on connecting and on every answer, for which all calls but lookups wait
    lookup_s       bound on a whole longest_prefix: a request waits for it
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
    ) -> None:
        prefix = f"kvferry:{cluster}:"
        self._members, self._leases, self._rows = prefix + "nodes", prefix + "node:", prefix + "b:"
        self._lookup_s = lookup_s
        self._told_unreadable = False
        self._lease_ms, self._row_ttl_ms = int(lease_s * 1000), int(row_ttl_s * 1000)
        self._client = redis_client.connected(url, timeout_s)
        register = self._client.register_script
        self._announce, self._withdraw = register(redis_scripts.ANNOUNCE), register(redis_scripts.WITHDRAW)
        self._nodes, self._publish = register(redis_scripts.NODES), register(redis_scripts.PUBLISH)
        self._refresh, self._longest = register(redis_scripts.REFRESH), register(redis_scripts.LONGEST_PREFIX)

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await redis_client.close(self._client)

    async def ping(self) -> None:
        """Raise RegistryUnavailable unless the server answers."""
        await translated(self._client.ping())

    async def announce(self, lease: NodeLease) -> Announced:
        keys = [self._members, self._leases + lease.node_id]
        answer = await run(self._announce, keys, [lease.node_id, lease.epoch, pack(lease), self._lease_ms])
        return Announced(answer.decode())

    async def withdraw(self, node_id: str, epoch: int) -> None:
        await run(self._withdraw, [self._members, self._leases + node_id], [node_id, epoch])

    async def nodes(self) -> list[NodeLease]:
        """Leases that this version cannot read are left out: an incompatible node may share the registry."""
        leases, unreadable = [], ""
        for packed in await run(self._nodes, [self._members, self._leases], []):
            try:
                lease = unpack(packed)
            except WireError as error:
                unreadable = str(error)
                continue
            if isinstance(lease, NodeLease):
                leases.append(lease)
        if unreadable and not self._told_unreadable:
            log.warning("a lease cannot be read, its node is not used: %s", unreadable)
        self._told_unreadable = bool(unreadable)
        return leases

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        args = [node_id, epoch, self._row_ttl_ms, b"".join(stored), b"".join(removed)]
        await run(self._publish, [self._rows], args)

    async def refresh(self, node_id: str, epoch: int, hashes: Sequence[bytes]) -> None:
        args = [node_id, epoch, self._row_ttl_ms, b"".join(hashes)]
        await run(self._refresh, [self._rows, self._leases], args)

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        if not hashes or not nodes:
            return {}
        asked: list[str | int] = [part for node in nodes.items() for part in node]
        answer = await self._cancellable(run(self._longest, [self._rows], [b"".join(hashes), *asked]))
        return {node.decode(): length for node, length in zip(answer[::2], answer[1::2], strict=True)}

    async def _cancellable(self, lookup: Coroutine[Any, Any, Any]) -> Any:
        """Await a lookup in a task of its own. The client library waits with `asyncio.wait_for`, which before Python
        3.12 swallows a cancellation that comes as the wait ends: a request whose client had left ran on to its last
        token. A lookup that nobody waits for any more ends in its time, since breaking it off costs its connection."""
        task = asyncio.ensure_future(lookup)
        late = asyncio.get_running_loop().call_later(self._lookup_s, task.cancel)
        task.add_done_callback(lambda _: late.cancel())
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait((task,), timeout=self._lookup_s)
        if not done or task.cancelled():
            raise RegistryUnavailable(f"no answer from Redis within {self._lookup_s} s")
        return task.result()
