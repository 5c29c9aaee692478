"""Chooses a request's endpoints by kvferry's placement, and reserves its share of the chosen node's load."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import urlsplit

from kvferry.endpoint_picker.pick import Pick
from kvferry.placement.rejections import TargetMissed, no_nodes, too_late
from kvferry.placement.types import Demand, NodeKey, Placement
from kvferry.protocol.errors import NoNodes, Overloaded
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.dispatch.prefixes import Remembered
from kvferry.router.dispatch.timers import Backoff
from kvferry.router.nodes.node_entry import NodeEntry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PickRequest:
    """Request to place.

    prompts    token ids of each prompt; empty if they are unknown
    tokens     prompt tokens in total
    sequences  sequences that it generates
    namespace  of its blocks: the client's cache salt
    adapter    id of its LoRA adapter; empty: none
    subset     endpoints that it may go to, as ip:port or ip; None: any
    itl_s      target of the mean seconds between its tokens; infinite: none
    left_s     returns the seconds until its deadline, or its target of the first token if that is earlier
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    sequences: int
    namespace: str
    adapter: str
    subset: frozenset[str] | None
    itl_s: float
    left_s: Callable[[], float]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt, at least 1."""
        return max([1, *map(len, self.prompts)]) if self.prompts else self.tokens


class Picker:
    """Places requests of one model on the engines behind its nodes; fallbacks: further endpoints of each request.

    An engine that reports its blocks is found by the block index. For any other engine the picker remembers the prompts
    sent to it."""

    def __init__(self, cluster: ModelCluster, metrics: RouterMetrics, fallbacks: int) -> None:
        self.cluster = cluster
        self._metrics, self._fallbacks = metrics, fallbacks
        self._remembered = Remembered()

    async def pick(self, request: PickRequest) -> Pick:
        """Return the endpoints of a request, booked on the first; the caller must call `end`.

        While no node can take it, it waits for at most the cluster's queue timeout. Raises NoNodes, Overloaded,
        ContextLengthExceeded; at once NoNodes if no endpoint is allowed, and TargetMissed."""
        backoff, waiter = Backoff(self.cluster.max_wait_s), object()
        try:
            while True:
                hashes = self._hashes(request)
                held = await self._held(hashes)
                try:
                    return self._place(request, hashes, held)
                except (NoNodes, Overloaded) as error:
                    if isinstance(error, TargetMissed):
                        raise
                    if isinstance(error, Overloaded) and not self.cluster.held.takes(waiter):
                        raise
                    if not self._allowed(request) or backoff.expired(request.left_s()):
                        raise
                self.cluster.held.enter(waiter, request.tokens)
                await asyncio.sleep(backoff.pause_s())
        finally:
            self.cluster.held.leave(waiter)

    def _hashes(self, request: PickRequest) -> dict[str, list[bytes]]:
        """Return the block hashes of the first prompt, by fingerprint of the nodes."""
        if not request.prompts:
            return {}
        ids, names = request.prompts[0], (request.namespace, request.adapter)
        groups = self.cluster.model.groups
        return {each.fingerprint: chain(root_hash(each.fingerprint, *names), ids, each.block_size) for each in groups}

    async def _held(self, hashes: Mapping[str, Sequence[bytes]]) -> dict[str, dict[str, int]]:
        """Return the leading blocks that nodes hold, by fingerprint and node id."""
        found = await self.cluster.reuse(hashes, {})
        held = {fingerprint: {**blocks} for fingerprint, blocks in found.items()}
        for fingerprint, own in hashes.items():
            blocks = held.setdefault(fingerprint, {})
            for node_id, count in self._remembered.held(own, self._silent(fingerprint)).items():
                blocks[node_id] = max(count, blocks.get(node_id, 0))
        return held

    def _silent(self, fingerprint: str) -> dict[str, int]:
        """Return the epochs, by node id, of the engines of a fingerprint that report no blocks."""
        leases = [entry.lease for entry in self.cluster.model.members]
        return {
            lease.node_id: lease.epoch
            for lease in leases
            if lease.fingerprint == fingerprint and "kv_events" not in lease.guarantees
        }

    def _allowed(self, request: PickRequest) -> dict[NodeKey, str]:
        """Return the endpoints of the nodes to which the request may go."""
        found = {entry.key: endpoint_of(entry.lease.engine_url) for entry in self.cluster.model.members}
        return {key: endpoint for key, endpoint in found.items() if endpoint and _within(endpoint, request.subset)}

    def _place(
        self, request: PickRequest, hashes: Mapping[str, Sequence[bytes]], held: Mapping[str, Mapping[str, int]]
    ) -> Pick:
        """Place and book a request, without an await in between."""
        cluster, endpoints = self.cluster, self._allowed(request)
        if not endpoints:
            raise no_nodes(cluster.model.name.first)
        others = frozenset(entry.key for entry in cluster.model.members if entry.key not in endpoints)
        demand = Demand(request.longest, excluded=others, adapter=request.adapter, local_only=True, itl_s=request.itl_s)
        placement = cluster.place(demand, held)
        if (late_s := placement.promised_s - request.left_s()) > 0:
            raise too_late(late_s)
        chosen = [self._entry(placement)]
        with contextlib.suppress(NoNodes, Overloaded):
            while len(chosen) <= self._fallbacks:
                tried = demand.excluded | {entry.key for entry in chosen}
                chosen.append(self._entry(cluster.place(replace(demand, excluded=tried), held)))
        self._metrics.placements.labels("local").inc()
        sizes = [len(prompt) for prompt in request.prompts] or [request.tokens]
        copies = max(1, request.sequences // len(sizes))
        blocks = sum(blocks_for(size + 1, chosen[0].lease.block_size) for size in sizes) * copies
        uncached = max(0, request.tokens - placement.cached_len)
        nodes = [(entry, endpoints[entry.key]) for entry in chosen]
        return Pick(cluster, self._remembered, nodes, hashes, placement.cached_len, uncached, blocks)

    def _entry(self, placement: Placement) -> NodeEntry:
        assert placement.decode
        return self.cluster.nodes.entries[placement.decode.node_id, placement.decode.epoch]


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> str:
    """Return `ip:port` of an engine's URL; empty if it has no such address, since Envoy resolves no names."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        address = ipaddress.ip_address(parts.hostname or "")
    except (ValueError, KeyError):
        if url:
            log.warning("an engine's address must be http://ip:port for a gateway, got %r: not used", url)
        return ""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _within(endpoint: str, subset: frozenset[str] | None) -> bool:
    if subset is None or endpoint in subset:
        return True
    host = endpoint.rpartition(":")[0]
    return host in subset or host.strip("[]") in subset
