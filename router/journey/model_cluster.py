"""The nodes of one model as the router sees them: implements `router.journey.spec.Cluster`, and
`router.journey.ports.Ground`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from placement.capacity import Capacity, capacity
from placement.place import place
from placement.terms import Demand, NodeKey, Placement
from protocol.lease import NodeLease
from protocol.messages import Job, Reuse
from protocol.metrics import RouterMetrics
from router.journey.attempt import Attempt, Errands, Event
from router.journey.journey import RouterJourney
from router.journey.spec import ClusterInfo, RequestSpec
from router.nodes.adapters import GroupAdapters
from router.nodes.client import NodeClient
from router.nodes.entry import NodeEntry
from router.nodes.group import NodeGroup
from router.nodes.table import NodeTable

log = logging.getLogger(__name__)

CAPACITY_S = 0.5
"""How long what the nodes take at once is taken for what it was."""


class BlockLookup(Protocol):
    """The block index, as far as the router needs it."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Leading blocks held, by node id, for nodes given with their live epoch."""


class BlockIndex:
    """The index, asked within a time: what it does not answer is taken as nothing. The log has one line per outage."""

    def __init__(self, lookup: BlockLookup, metrics: RouterMetrics, limit_s: float) -> None:
        self._lookup, self._metrics, self._limit_s = lookup, metrics, limit_s
        self._answers = True

    async def held(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Leading blocks held, by node id, of nodes given with their epoch; nothing if there is no answer in time."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s):
                held = await self._lookup.longest_prefix(hashes, nodes)
        except Exception as error:
            if self._answers:
                log.warning("block index does not answer, placing by load alone: %r", error)
            self._answers = False
            return {}
        finally:
            self._metrics.index_seconds.observe(time.perf_counter() - began)
        if not self._answers:
            log.info("block index answers again")
        self._answers = True
        return held


@dataclass(frozen=True, slots=True)
class Shared:
    """What the clusters of all models have in common; `RouterCluster` owns it. local_tokens and patience_s as there."""

    nodes: NodeTable
    client: NodeClient
    index: BlockIndex
    errands: Errands
    metrics: RouterMetrics
    local_tokens: int
    patience_s: float


class ModelCluster:
    """One group of the node table, placed on."""

    def __init__(self, group: NodeGroup, shared: Shared) -> None:
        self.nodes, self.group = shared.nodes, group
        self.metrics = shared.metrics
        self.errands = shared.errands
        self.patience_s = shared.patience_s
        self.router_id = shared.client.router_id
        self._client, self._index, self._local_tokens = shared.client, shared.index, shared.local_tokens
        self.adapters = GroupAdapters(group, shared.nodes, shared.client)
        self._info: ClusterInfo | None = None
        self._capacity, self._capacity_until = Capacity(), 0.0
        self.nodes.listen(self._follow)

    def info(self) -> ClusterInfo | None:
        return self._info

    def ready(self) -> dict[str, int]:
        return {role: len(self.able(role)) for role in ("prefill", "decode")}

    def capacity(self) -> Capacity:
        now = self.nodes.clock()
        if now >= self._capacity_until:
            leases = (entry.lease for entry in self.group.members)
            self._capacity, self._capacity_until = capacity(leases), now + CAPACITY_S
        return self._capacity

    def start(self, spec: RequestSpec) -> RouterJourney:
        """The work begins with the first iteration. What is refused here is what no node could take, whatever its
        prompt: one look at kept sums, however many nodes there are."""
        room = self.group.room
        if not spec.work.ends_on_prompt() or not room.total.prefills:
            refusal = room.refusal()
            if refusal:
                raise refusal
        return RouterJourney(spec, self)

    def able(self, role: str, besides: NodeKey | None = None, adapter: str = "") -> set[NodeKey]:
        """Nodes that could take an attempt: ready, holding the adapter, and reachable as far as known; `besides` even
        if it is not."""
        now = self.nodes.clock()
        return {
            entry.key
            for entry in self.group.members
            if entry.lease.role == role
            and entry.lease.state == "ready"
            and (entry.key == besides or entry.reachable(now))
            and _holds(entry.lease, adapter)
        }

    async def reuse(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks held, by node id; nothing when the index does not answer in time (load-only placement)."""
        nodes = dict(entry.key for entry in self.group.members)
        if not hashes or not nodes or not self.nodes.up:
            return {}
        return await self._index.held(hashes, nodes)

    def place(self, demand: Demand, held: Mapping[str, int]) -> Placement:
        """`held`: leading blocks by node id. Raises what `placement.place` raises. Nothing is booked yet: between this
        and `launch` nothing may be awaited."""
        now = self.nodes.clock()
        views = [
            replace(entry.view, cached_len=held[entry.key[0]] * entry.lease.block_size)
            if entry.key[0] in held
            else entry.view
            for entry in self.group.members
            if (entry.reachable(now) or entry.key == demand.pinned) and _holds(entry.lease, demand.adapter)
        ]
        return place(replace(demand, local_tokens=self._local_tokens, model=self.group.name.first), views)

    def launch(self, job: Job, placement: Placement, post: Callable[[Event], None]) -> Attempt:
        """Book the placement and begin."""
        self.metrics.placements.labels("remote" if placement.prefill else "local").inc()
        return Attempt(
            job,
            placement,
            post,
            prefill=self._entry(placement.prefill),
            decode=self._entry(placement.decode),
            suspect=self.nodes.suspect,
            client=self._client,
            errands=self.errands,
        )

    def record(self, first: Placement, last: Placement, reuse: Reuse, waited_s: float) -> None:
        """The first token came: compare what the placements promised with what happened. `first` is the placement of
        the request's first attempt, `last` that of the attempt which delivered, `waited_s` since its launch."""
        moved = max(0, first.cached_len - last.cached_len)
        evicted = max(0, min(first.cached_len, last.cached_len) - reuse.cached_len)
        self.metrics.predicted_reuse.inc(first.cached_len)
        self.metrics.actual_reuse.inc(reuse.cached_len)
        if moved:
            self.metrics.reuse_misses.labels("failover").inc(moved)
        if evicted:
            self.metrics.reuse_misses.labels("evicted").inc(evicted)
        self.metrics.placement_regret.inc(max(0.0, waited_s - last.first_token_s))
        log.debug(
            "first token after %.4f s (expected %.4f), reused %d tokens (expected %d)",
            waited_s, last.first_token_s, reuse.cached_len, first.cached_len,
        )  # fmt: skip

    def account(self, told: Reuse | None, job: Job, node: NodeLease | None) -> Reuse:
        """Where the prompt's tokens came from, as `node` told it. A wrong account is the node's bug and no reason to
        fail a request: it is named, counted, and taken as nothing reused, like none at all."""
        length = len(job.token_ids)
        if told is not None and told.balanced and told.prompt_len == length:
            return told
        if told is not None:
            self.metrics.account_violations.inc()
            log.error("%s: wrong account of %d tokens from %s: %s", job.request_id, length, node and node.node_id, told)
        return Reuse(length, computed=length)

    def _entry(self, lease: NodeLease | None) -> NodeEntry | None:
        return self.nodes.entries[(lease.node_id, lease.epoch)] if lease else None

    def _follow(self) -> None:
        """The nodes changed: describe those that work together now."""
        if leases := [entry.lease for entry in self.group.members]:
            self._info = ClusterInfo(
                model=leases[0].model,
                max_model_len=min(lease.max_model_len for lease in leases),
                block_size=leases[0].block_size,
                fingerprint=leases[0].fingerprint,
            )


def _holds(lease: NodeLease, adapter: str) -> bool:
    return not adapter or any(each.id == adapter for each in lease.adapters)
