"""ModelNodes: live nodes of one model, grouped by fingerprint, as placement sees them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, on_tier, owner
from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import NodeKey, NodeView, TierPrefix
from kvferry.protocol.fast_init import replaced
from kvferry.protocol.labels import OWN_TIERS, ROLES
from kvferry.protocol.lease import NodeLease
from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.checkpoints import Checkpoints
from kvferry.router.nodes.node_entry import NodeEntry

log = logging.getLogger(__name__)

OWN_ENGINE = "kvferry"
"""Name of the engine of a node whose lease names none."""


class FingerprintGroup:
    """Nodes of one model that share a fingerprint: only they exchange blocks and continue each other's streams.

    members        its nodes, draining ones included
    epochs         epochs of the members, by node id and by `index.on_tier` of it
    first_epoch    epoch of the member that started first, or `known`, the value before the last change
    states         how the members keep recurrent states; None for a model without recurrent layers
    decodes        true with a ready decode node
    max_model_len  smallest limit of all members
    """

    def __init__(self, members: Sequence[NodeEntry], known: int | None = None) -> None:
        self.members = members
        leases = [entry.lease for entry in members]
        self.fingerprint, self.block_size = leases[0].fingerprint, leases[0].block_size
        self.engine = leases[0].engine or OWN_ENGINE
        self.first_epoch = min(lease.epoch for lease in leases) if known is None else known
        self.states = Checkpoints(leases[0].state_blocks, leases[0].state_stride) if leases[0].state_blocks else None
        self.decodes = any(lease.role == "decode" and lease.state == "ready" for lease in leases)
        self.max_model_len = min(lease.max_model_len for lease in leases)
        self.epochs = dict(entry.key for entry in members)
        for (node_id, epoch), tier in product(list(self.epochs.items()), OWN_TIERS):
            self.epochs[on_tier(node_id, tier)] = epoch

    def __contains__(self, key: NodeKey) -> bool:
        return self.epochs.get(key[0]) == key[1]

    @property
    def names(self) -> dict[str, int]:
        """Return the index names of blocks that members hold or can read, with their epochs."""
        shared = any(entry.lease.rates.store_block_s for entry in self.members)
        return {**self.epochs, ON_STORE: STORE_EPOCH} if shared else self.epochs

    def stored_len(self, held: Mapping[str, int], total_len: int) -> int:
        """Return the leading tokens that members find in their shared store: whole blocks, never the last token."""
        size = self.block_size
        return min(blocks * size, total_len - 1) // size * size if (blocks := held.get(ON_STORE, 0)) else 0


class ModelNodes:
    """Nodes of one model, in groups by fingerprint. Placement chooses over all groups; one request's nodes share one.

    name      name of the model
    members   all live nodes that take attempts, of any fingerprint and state
    encoders  live encode nodes
    live      members and encoders
    groups    groups of members by fingerprint
    capacity  free capacity of the members
    """

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self.members: list[NodeEntry] = []
        self.encoders: list[NodeEntry] = []
        self.live: list[NodeEntry] = []
        self.groups: list[FingerprintGroup] = []
        self.capacity = CapacitySummary(name.first)

    def keep(self, entries: Iterable[NodeEntry]) -> None:
        """Update the model's live nodes, of any fingerprint and state."""
        self.live = list(entries)
        self.members = [entry for entry in self.live if entry.lease.role in ROLES]
        self.encoders = [entry for entry in self.live if entry.lease.role not in ROLES]
        by_fingerprint: dict[str, list[NodeEntry]] = {}
        for entry in self.members:
            by_fingerprint.setdefault(entry.lease.fingerprint, []).append(entry)
            entry.join(True)
        known = {group.fingerprint: group.first_epoch for group in self.groups}
        self.groups = [FingerprintGroup(nodes, known.get(fingerprint)) for fingerprint, nodes in by_fingerprint.items()]
        for group in self.groups:
            if group.fingerprint not in known:
                log.info("%s has nodes of fingerprint %s (%s)", self.name.first, group.fingerprint, group.engine)

    @property
    def suspects(self) -> set[NodeKey]:
        """Return the nodes that are suspected of hanging, or whose links are."""
        return {entry.key for entry in self.members if entry.suspected or entry.link_suspected}

    @property
    def usable(self) -> list[FingerprintGroup]:
        """Return the groups with a ready decode node; all if none has one."""
        return [group for group in self.groups if group.decodes] or self.groups

    def of(self, fingerprint: str) -> list[FingerprintGroup]:
        """Return the group of this fingerprint; empty if it has no live node."""
        return [group for group in self.groups if group.fingerprint == fingerprint]

    def views(
        self,
        group: FingerprintGroup,
        held: Mapping[str, int],
        adapter: str,
        modalities: Collection[str] = (),
    ) -> list[NodeView]:
        """Return the reachable nodes of a group, with the adapter if one is given, and the prefix that each holds.

        Nodes that do not take all of `modalities` are excluded. `held` counts leading blocks by node id, and by
        `index.on_tier` of it."""
        known = self.capacity.views
        views = known.copy() if len(self.groups) == 1 else {key: known[key] for key in known if key in group}
        for name in held:
            key = (owner(name), group.epochs.get(name, 0))
            if key in views:
                views[key] = _holding(known[key], held)
        found = list(views.values())
        if not (adapter or modalities):
            return found
        return [view for view in found if holds(view.lease, adapter) and takes(view.lease, modalities)]

    def leases(self) -> list[NodeLease]:
        """Return the leases of all the model's live nodes that take attempts, of any fingerprint and state."""
        return [entry.lease for entry in self.members]

    def all_leases(self) -> list[NodeLease]:
        """Return the leases of all the model's live nodes, encode nodes included."""
        return [entry.lease for entry in self.live]


def _holding(view: NodeView, held: Mapping[str, int]) -> NodeView:
    lease = view.lease
    cached = held.get(lease.node_id, 0)
    kept = tuple(
        TierPrefix(blocks * lease.block_size, block_s)
        for name, block_s in tiers(lease)
        if (blocks := held.get(name, 0))
    )
    if not (cached or kept):
        return view
    return replaced(view, cached_len=cached * lease.block_size, kept=kept)


def tiers(lease: NodeLease) -> Iterator[tuple[str, float]]:
    """Yield the node's own tiers, fastest first: the index name and the seconds to read a block."""
    rates = lease.rates
    for tier, block_s in zip(OWN_TIERS, (rates.host_block_s, rates.disk_block_s), strict=True):
        if block_s:
            yield on_tier(lease.node_id, tier), block_s


def holds(lease: NodeLease, adapter: str) -> bool:
    """Return whether the node has the adapter of this id; true for the empty id."""
    return not adapter or any(each.id == adapter for each in lease.adapters)


def takes(lease: NodeLease, modalities: Collection[str]) -> bool:
    """Return whether prompts of the node may hold all of these media."""
    return all(each in lease.modalities for each in modalities)
