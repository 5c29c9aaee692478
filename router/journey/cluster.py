"""All nodes as the router sees them: implements `router.journey.spec.Cluster`, and `router.journey.ports.Ground`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from placement.place import place
from placement.terms import Demand, NodeKey, Placement
from protocol.lease import NodeLease
from protocol.messages import Job, Reuse
from protocol.metrics import RouterMetrics
from router.journey.attempt import Attempt, Errands, Event
from router.journey.journey import RouterJourney
from router.journey.spec import ClusterInfo, RequestSpec
from router.nodes.client import NodeClient
from router.nodes.entry import NodeEntry
from router.nodes.table import NodeSource, NodeTable
from router.nodes.token_streams import TokenStreams

log = logging.getLogger(__name__)

ERRANDS_S = 1.0
"""How long closing waits for cancels still under way."""


class BlockLookup(Protocol):
    """The block index, as far as the router needs it."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Leading blocks held, by node id, for nodes given with their live epoch."""


class RouterCluster:
    """Joins node table, token streams, index and client. `await open()` in the loop that will serve, `await close()`
    when every journey has ended (or `async with`). Source and index stay the caller's to close.

    local_tokens   see RouterSettings.local_prefill_tokens
    lookup_s       bounds the question to the index
    patience_s     how long a request that already began waits for a node when none can take it
    """

    def __init__(
        self,
        source: NodeSource,
        index: BlockLookup,
        metrics: RouterMetrics,
        *,
        local_tokens: int = 0,
        lookup_s: float = 0.1,
        patience_s: float = 15.0,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
    ) -> None:
        self.client = client or NodeClient(f"router-{secrets.token_hex(6)}")
        self.router_id = self.client.router_id
        self.nodes = nodes or NodeTable(source, metrics)
        self.metrics = metrics
        self.errands = Errands()
        self.patience_s = patience_s
        self._streams = TokenStreams(self.client)
        self._index, self._lookup_s = index, lookup_s
        self._index_answers = True
        self._local_tokens = local_tokens
        self._info: ClusterInfo | None = None
        self.nodes.listen(self._follow)

    async def open(self) -> None:
        """Read the registry once and begin to follow it; token streams open in the background. Never fails: without
        nodes or registry the cluster is simply not ready."""
        await self.nodes.start()

    async def close(self) -> None:
        await self.nodes.stop()
        await self.errands.finish(ERRANDS_S)
        await self._streams.close()
        await self.client.aclose()

    async def __aenter__(self) -> RouterCluster:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def info(self) -> ClusterInfo | None:
        return self._info

    def ready(self) -> dict[str, int]:
        return {role: len(self.able(role)) for role in ("prefill", "decode")}

    def start(self, spec: RequestSpec) -> RouterJourney:
        """The work begins with the first iteration. What is refused here is what no node could take, whatever its
        prompt: one look at kept sums, however many nodes there are."""
        room = self.nodes.room
        if not spec.work.ends_on_prompt() or not room.total.prefills:
            refusal = room.refusal()
            if refusal:
                raise refusal
        return RouterJourney(spec, self)

    def able(self, role: str, besides: NodeKey | None = None) -> set[NodeKey]:
        """Nodes that could take an attempt: ready, and reachable as far as known; `besides` even if it is not."""
        now = self.nodes.clock()
        return {
            entry.key
            for entry in self.nodes.group
            if entry.lease.role == role
            and entry.lease.state == "ready"
            and (entry.key == besides or entry.reachable(now))
        }

    async def reuse(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks held, by node id; nothing when the index does not answer in time (load-only placement)."""
        nodes = dict(entry.key for entry in self.nodes.group)
        if not hashes or not nodes or not self.nodes.up:
            return {}
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._lookup_s):
                held = await self._index.longest_prefix(hashes, nodes)
        except Exception as error:
            if self._index_answers:
                log.warning("block index does not answer, placing by load alone: %r", error)
            self._index_answers = False
            return {}
        finally:
            self.metrics.index_seconds.observe(time.perf_counter() - began)
        if not self._index_answers:
            log.info("block index answers again")
        self._index_answers = True
        return held

    def place(self, demand: Demand, held: Mapping[str, int]) -> Placement:
        """`held`: leading blocks by node id. Raises what `placement.place` raises. Nothing is booked yet: between this
        and `launch` nothing may be awaited."""
        now = self.nodes.clock()
        views = [
            replace(entry.view, cached_len=held[entry.key[0]] * entry.lease.block_size)
            if entry.key[0] in held
            else entry.view
            for entry in self.nodes.group
            if entry.reachable(now) or entry.key == demand.pinned
        ]
        return place(replace(demand, local_tokens=self._local_tokens), views)

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
            client=self.client,
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
        """The nodes changed: hold a stream to every decode node, and describe the present group."""
        self._streams.keep(entry for entry in self.nodes.entries.values() if entry.lease.role == "decode")
        if group := [entry.lease for entry in self.nodes.group]:
            self._info = ClusterInfo(
                model=group[0].model,
                max_model_len=min(lease.max_model_len for lease in group),
                block_size=group[0].block_size,
                fingerprint=group[0].fingerprint,
            )
