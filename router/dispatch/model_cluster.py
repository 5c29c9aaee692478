"""ModelCluster: the nodes of one model as the API sees them; places and launches attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.placement.blocks import crowded
from kvferry.placement.cache_value import CacheValue
from kvferry.placement.capacity import Capacity, capacity
from kvferry.placement.place import place_among
from kvferry.placement.rejections import no_nodes
from kvferry.placement.types import Demand, NodeKey, NodeView, Placement
from kvferry.protocol.errors import ContextLengthExceeded, NoNodes, Overloaded
from kvferry.protocol.fast_init import replaced
from kvferry.protocol.labels import PLACEMENT_KINDS, ROLES
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import DecodeTarget, Job
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.context import Hashes, Hits
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.displacement import Displacement
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.inflight_prefixes import InflightPrefixes
from kvferry.router.dispatch.interface import ClusterInfo, RequestSpec
from kvferry.router.dispatch.media_encoding import MediaEncoding
from kvferry.router.dispatch.migration_attempt import MigrationAttempt
from kvferry.router.dispatch.model_media import ModelMedia
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.dispatch.readiness import Readiness
from kvferry.router.dispatch.router_services import RouterServices
from kvferry.router.nodes.adapters import ModelAdapters
from kvferry.router.nodes.circuit_breakers import OpenBreakers
from kvferry.router.nodes.model_nodes import FingerprintGroup, ModelNodes, holds
from kvferry.router.nodes.node_entry import NodeEntry, node_key

log = logging.getLogger(__name__)

CAPACITY_S = 0.5
"""Age after which the capacity is computed again, in seconds."""


class ModelCluster:
    """Places and launches attempts on one model's nodes. Implements `interface.Cluster`, `context.DispatchContext`."""

    def __init__(self, model: ModelNodes, shared: RouterServices) -> None:
        self.nodes, self.model, self.metrics = shared.nodes, model, shared.metrics
        self._reuse = shared.metrics.reuse.of(model.name.first)
        self._placements = {kind: self.metrics.placements.labels(kind) for kind in PLACEMENT_KINDS}
        self.background_calls, self.max_wait_s = shared.background_calls, shared.max_wait_s
        self.held, self.inflight_prefixes, self.worth = PendingRequests(), InflightPrefixes(), CacheValue()
        self.deaths, self.retries = shared.deaths, shared.retries
        self.hedges, self.looks = shared.hedges, shared.looks
        self.router_id, self.request_log = shared.client.router_id, shared.request_log
        self._prefixes, self._local_tokens = shared.prefixes, shared.local_tokens
        self._calls = MediaEncoding(model, shared)
        self._buddies, self._fetch, self.canary = shared.buddies, shared.fetch, shared.canary
        self.adapters = ModelAdapters(model, shared.nodes, shared.client)
        self.media = ModelMedia(model, shared.nodes, shared.client)
        self.leases, self.displacement = model.all_leases, Displacement(model.capacity)
        self.session_notes, self.close_session = shared.session_notes, partial(shared.session_notes.closes, model)
        self._info: ClusterInfo | None = None
        self.trouble, self._capacity, self._capacity_until = Readiness(shared.nodes), Capacity(), 0.0
        self.nodes.listen(self._follow)

    def info(self) -> ClusterInfo | None:
        return self._info

    def ready(self) -> dict[str, int]:
        return {role: len(self.usable(role)) for role in ROLES} | self._calls.ready()

    def capacity(self) -> Capacity:
        now = self.nodes.clock()
        if now >= self._capacity_until:
            leases = (entry.lease for group in self.model.usable for entry in group.members)
            self._capacity, self._capacity_until = capacity(leases), now + CAPACITY_S
        return self._capacity

    def start(self, spec: RequestSpec) -> RequestDispatch:
        """Return a dispatch, idle until its first iteration; raise Overloaded if nodes and queue are full."""
        room = self.model.capacity  # maintained sums: the cost does not grow with the number of nodes
        if not self.held.has_room and (not spec.work.ends_on_prompt() or not room.total.prefills):
            refusal = room.refusal()
            if isinstance(refusal, Overloaded):
                raise refusal
        self.retries.requests += 1
        self.hedges.requests += 1
        return RequestDispatch(spec, self)

    def usable(self, role: str, also: NodeKey | None = None, adapter: str = "", fingerprint: str = "") -> set[NodeKey]:
        """Return the ready and reachable nodes with the adapter; `also` counts despite an open breaker."""
        shut = self._open_breakers().nodes
        return {
            entry.key
            for entry in self.model.members
            if entry.lease.role == role
            and entry.lease.state == "ready"
            and entry.reachable
            and (entry.key == also or entry.key not in shut)
            and holds(entry.lease, adapter)
            and fingerprint in ("", entry.lease.fingerprint)
        }

    async def reuse(self, hashes: Hashes, held: Mapping[NodeKey, int]) -> Hits:
        """Return the leading blocks held, in-flight ones included, by node id or other index name; see `Prefixes`."""
        if len(hashes) == 1:  # the usual case, without a task
            ((fingerprint, own),) = hashes.items()
            return {fingerprint: await self._held_in(fingerprint, own, held)}
        found = await asyncio.gather(*(self._held_in(fingerprint, own, held) for fingerprint, own in hashes.items()))
        return dict(zip(hashes, found, strict=True))

    async def _held_in(self, fingerprint: str, hashes: Sequence[bytes], held: Mapping[NodeKey, int]) -> dict[str, int]:
        group = next(iter(self.model.of(fingerprint)), None)
        if not hashes or group is None:
            return {}
        nodes = group.names
        found = await self._prefixes.held(hashes, nodes, self.nodes.registry_health.up, group.states)
        here = {node_id: blocks for (node_id, epoch), blocks in held.items() if nodes.get(node_id) == epoch}
        for node_id, blocks in (*self.inflight_prefixes.held(hashes, nodes).items(), *here.items()):
            found[node_id] = max(blocks, found.get(node_id, 0))
        return found

    def remember(self, hashes: Sequence[bytes], nodes: Sequence[NodeLease]) -> None:
        """Record that these nodes computed the prompt of these blocks."""
        self._prefixes.note(hashes, tuple(map(node_key, nodes)))

    def place(self, demand: Demand, held: Hits, groups: Sequence[FingerprintGroup] | None = None) -> Placement:
        """Place an attempt in one of these groups, by default any, given the result of `reuse`.

        Raises what `placement.place_among` raises. Reserves nothing: do not await between this and `launch`. Uses open
        breakers and suspected nodes last, and never for migrations."""
        groups = self.model.groups if groups is None else groups
        if demand.pinned and len(groups) > 1:
            groups = [group for group in groups if demand.pinned in group] or groups
        if not groups:
            raise no_nodes(self.model.name.first)
        sides = [self._side(demand, group, held.get(group.fingerprint, {})) for group in groups]
        shut, suspects = self._open_breakers(), self.model.suspects
        if suspects or any(shut):
            nodes = demand.excluded | (shut.nodes | suspects) - {demand.pinned}
            broken = demand.broken | shut.pairs
            avoiding = [(replaced(each, excluded=nodes, broken=broken), views) for each, views in sides]
            if demand.source:
                return place_among(avoiding)
            with contextlib.suppress(NoNodes, Overloaded, ContextLengthExceeded):
                return place_among(avoiding)
        return place_among(sides)

    def _side(self, demand: Demand, group: FingerprintGroup, held: Mapping[str, int]) -> tuple[Demand, list[NodeView]]:
        """Return the demand on a group, and its nodes."""
        demand = replaced(
            demand,
            local_tokens=self._local_tokens,
            model=self.model.name.first,
            fetches=self._fetch,
            worth=0.0 if demand.recovers else self.worth.times,
            stored_len=group.stored_len(held, demand.total_len),
        )
        return demand, self.model.views(group, held, demand.adapter, demand.modalities)

    def launch(
        self, job: Job, placement: Placement, post: Callable[[Event], None], predecessor: Attempt | None = None,
        hashes: Sequence[bytes] = (),
    ) -> Attempt:  # fmt: skip
        """Reserve the placement and start the attempt."""
        if predecessor is not None:
            return MigrationAttempt(predecessor, job, placement, post, **self._parts(placement, ()))
        self._placements["remote" if placement.prefill else "local"].inc()
        if self._buddies and isinstance(job.work, Generate) and placement.decode:
            job = replaced(job, buddy=self._buddy(placement.prefill, placement.decode))
        return Attempt(job, placement, post, **self._parts(placement, hashes, media=bool(job.media)))

    def suspect(self, late: Placement, *, ships: bool = False) -> None:
        """Suspect the nodes of a late attempt, unless its decode node is crowded."""
        decode = self.nodes.entries.get(node_key(late.decode)) if late.decode else None
        if decode is None or not crowded(decode.view):
            self.nodes.breakers.late(late, ships=ships)

    def record(self, last: Placement, predicted: int, missed: Mapping[str, int], reuse: Reuse, waited_s: float) -> None:
        """Compare the predicted reuse and waiting time with the observed ones at the first token.

        `last` is the placement that delivered, `waited_s` after its launch; `predicted` and `missed`: see `Prediction`.
        """
        self._reuse.count(predicted, reuse.cached_len, missed)
        self.worth.record(reuse.cached_len, reuse.prompt_len)
        if waited_s > last.first_token_s:
            self.metrics.placement_regret.inc(waited_s - last.first_token_s)
        log.debug(
            "first token after %.4f s (expected %.4f), reused %d tokens (expected %d)",
            waited_s, last.first_token_s, reuse.cached_len, predicted,
        )  # fmt: skip

    def account(self, reported: Reuse | None, job: Job, node: NodeLease | None) -> Reuse:
        """Return the origin of the prompt's tokens as `node` reported it.

        A wrong account fails no request: it is logged, counted and, like a missing one, replaced by one without reuse.
        """
        length = len(job.token_ids)
        if reported is not None and reported.balanced and reported.prompt_len == length:
            return reported
        if reported is not None:
            self.metrics.account_violations.inc()
            name = node and node.node_id
            log.error("%s: wrong reuse accounting of %d tokens from %s: %s", job.request_id, length, name, reported)
        return Reuse(length, computed=length)

    def _open_breakers(self) -> OpenBreakers:
        return self.nodes.breakers.open() if self.nodes.breakers.any else OpenBreakers()

    def _buddy(self, prefill: NodeLease | None, decode: NodeLease) -> DecodeTarget | None:
        """Choose the node that keeps copies of the decode node's new full blocks.

        The prefill node has the blocks before them; without one, any other working node, preferably of role prefill."""
        if prefill is not None:
            return prefill.target
        nodes = self.usable("prefill", fingerprint=decode.fingerprint) or self.usable(
            "decode", fingerprint=decode.fingerprint
        )
        best = [self.nodes.entries[key].lease for key in sorted(nodes - {node_key(decode)})]
        return random.choice(best).target if best else None  # noqa: S311 - spreads the load

    def _parts(self, placement: Placement, hashes: Sequence[bytes], *, media: bool = False) -> dict[str, Any]:
        """Return the arguments of an attempt on this placement; `hashes` are those of the blocks that it computes."""
        computes = placement.prefill or placement.decode
        assert computes
        return {
            "expected": self.inflight_prefixes.sent(hashes, node_key(computes)),
            "prefill": self._entry(placement.prefill),
            "decode": self._entry(placement.decode),
            "breakers": self.nodes.breakers,
            "client": self._calls if media else self._calls.plain,
            "background_calls": self.background_calls,
            "request_log": self.request_log,
        }

    def _entry(self, lease: NodeLease | None) -> NodeEntry | None:
        return self.nodes.entries[(lease.node_id, lease.epoch)] if lease else None

    def _follow(self) -> None:
        if usable := self.model.usable:  # The nodes changed.
            longest = min(group.max_model_len for group in usable)
            fingerprints = sorted(group.fingerprint for group in usable)
            self._info = ClusterInfo(usable[0].members[0].lease.model, longest, tuple(fingerprints))
