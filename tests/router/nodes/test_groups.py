"""Nodes of several models in one registry: each in the group of its model, or in none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, on_tier
from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import TierPrefix
from kvferry.protocol.errors import NodeLost
from kvferry.protocol.lease import Load, NodeLease, Rates
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.nodes.capacity_summary import NodeCapacity
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_table import NodeTable
from tests.fake_workers import lease_of
from tests.router.nodes.test_node_table import Clock, Registry


def node(node_id: str, role: str, model: str, *names: str, **changes: Any) -> NodeLease:
    return lease_of(node_id, role, model=model, served_names=names, fingerprint=f"fp-{model}", **changes)


class Groups(NodeTable):
    clock: Clock

    def __init__(self, *names: ModelName) -> None:
        self.registry, self.clock, self.metrics = Registry(), Clock(), RouterMetrics()
        super().__init__(self.registry, self.metrics, clock=self.clock)
        for name in names:
            self.add(ModelNodes(name))

    async def see(self, *leases: NodeLease) -> list[set[str]]:
        """Ids by group."""
        self.clock.now += 0.5
        self.registry.leases = list(leases)
        await self.refresh()
        return [{entry.lease.node_id for entry in model.members} for model in self.models]


A, B = ModelName("a"), ModelName("b")


async def test_each_model_has_its_nodes_and_a_room_of_its_own() -> None:
    table = Groups(A, B)
    load = Load(free_blocks=10, total_blocks=10)
    leases = [node("p1", "prefill", "a"), node("d1", "decode", "a"), node("d2", "decode", "b", load=load)]
    assert await table.see(*leases) == [{"p1", "d1"}, {"d2"}]
    for entry in table.entries.values():
        entry.opened()
    first, second = (group.capacity for group in table.models)
    assert (first.total.prefills, first.total.decodes) == (1, 1)
    assert second.total == NodeCapacity(0, 1, second.total.spare_blocks, 0, second.total.freed_per_s)
    spare = first.total.spare_blocks
    table.entries[("d2", 1)].reserve(0, 10_000, lambda lost: None)
    assert "full" in str(second.refusal())
    assert first.total.spare_blocks == spare
    assert first.refusal() is None


async def test_views_are_of_members_that_can_be_reached_with_what_they_hold() -> None:
    table = Groups(A, B)
    disk = Rates(disk_block_s=0.001)
    leases = [node("p1", "prefill", "a", rates=disk), node("d1", "decode", "a"), node("d2", "decode", "b")]
    await table.see(*leases)
    for entry in table.entries.values():
        entry.opened()
    model, size = table.models[0], leases[0].block_size
    names = {"p1": 3, on_tier("p1", "disk"): 5, "d1": 2, on_tier("d1", "disk"): 9, "d2": 7, "gone": 1}
    held = {view.lease.node_id: (view.cached_len, view.kept) for view in model.views(model.groups[0], names, "")}
    assert held == {"p1": (3 * size, (TierPrefix(5 * size, 0.001),)), "d1": (2 * size, ())}
    assert [view.cached_len for view in model.views(model.groups[0], {}, "")] == [0, 0]
    assert model.views(model.groups[0], names, "an adapter") == []
    table.entries["d1", 1].broken(NodeLost("d1"))
    assert [view.lease.node_id for view in model.views(model.groups[0], names, "")] == ["p1"]
    await table.see(leases[0], leases[2], replace(leases[1], epoch=2))
    table.entries["d1", 2].opened()
    assert {view.key for view in model.views(model.groups[0], names, "")} == {("p1", 1), ("d1", 2)}


async def test_what_nodes_must_read_first_is_asked_for_and_told_to_placement() -> None:
    table = Groups(A)
    (model,) = table.models
    rates = Rates(host_block_s=0.001, disk_block_s=0.002, store_block_s=0.003)
    both = node("p1", "prefill", "a", rates=rates)
    disk = node("p2", "prefill", "a", rates=Rates(disk_block_s=0.004))
    await table.see(both, disk, node("d1", "decode", "a"))
    for entry in table.entries.values():
        entry.opened()
    (group,) = model.groups
    host, on_disk, others = on_tier("p1", "host"), on_tier("p1", "disk"), on_tier("p2", "disk")
    assert {*group.names} == {on_tier(*each) for each in product(("p1", "p2", "d1"), ("host", "disk"))} | {
        "p1", "p2", "d1", ON_STORE
    }  # fmt: skip
    assert (group.names[host], group.names[ON_STORE]) == (both.epoch, STORE_EPOCH)
    held = {"p1": 1, host: 2, on_disk: 4, others: 5, on_tier("d1", "disk"): 9, ON_STORE: 16}
    size = both.block_size
    views = {view.lease.node_id: view for view in model.views(model.groups[0], held, "")}
    assert (views["p1"].cached_len, views["p1"].kept) == (
        size,
        (TierPrefix(2 * size, 0.001), TierPrefix(4 * size, 0.002)),
    )
    assert (views["p2"].cached_len, views["p2"].kept) == (0, (TierPrefix(5 * size, 0.004),))
    assert views["d1"].kept == ()
    assert group.stored_len(held, 100 * size) == 16 * size
    assert group.stored_len(held, 10 * size) == 9 * size
    assert group.stored_len({}, 10 * size) == 0
    hung = replace(both, rates=Rates(host_block_s=0.001))
    await table.see(hung, disk, node("d1", "decode", "a"))
    (group,) = model.groups
    assert ON_STORE not in group.names
    views = {view.lease.node_id: view for view in model.views(model.groups[0], held, "")}
    assert views["p1"].kept == (TierPrefix(2 * size, 0.001),)


async def test_a_model_whose_nodes_leave_is_named_and_the_other_goes_on() -> None:
    table = Groups(A, B)
    one, other = node("d1", "decode", "a"), node("d2", "decode", "b")
    await table.see(one, other)
    table.entries[("d1", 1)].opened()
    assert await table.see(one) == [{"d1"}, set()]
    refusal = table.models[1].capacity.refusal()
    assert refusal is not None
    assert (refusal.status, refusal.retry_after) == (503, 2.0)
    assert "'b' has no decode node" in refusal.message
    assert table.models[0].capacity.refusal() is None


async def test_fingerprints_are_compared_within_a_model() -> None:
    """Each one has views of its own, with what its nodes hold."""
    table = Groups(A, B)
    odd = replace(node("d3", "decode", "b"), fingerprint="other")
    ids = await table.see(node("d1", "decode", "a"), node("p2", "prefill", "b"), node("d2", "decode", "b"), odd)
    assert ids == [{"d1"}, {"p2", "d2", "d3"}]
    states = ("ready", "incompatible")
    told = {name: [table.metrics.nodes.labels("decode", state, name)._value.get() for state in states] for name in "ab"}
    assert told == {"a": [1, 0], "b": [2, 0]}
    await table.see(node("d2", "decode", "b"))
    assert table.metrics.nodes.labels("decode", "ready", "a")._value.get() == 0
    await table.see(node("p2", "prefill", "b"), node("d2", "decode", "b"), odd)
    for entry in table.entries.values():
        entry.opened()
    model, held = table.models[1], {"d2": 2, "d3": 3}
    views = [{view.key[0]: view.cached_len for view in model.views(group, held, "")} for group in model.groups]
    assert views == [{"p2": 0, "d2": 2 * odd.block_size}, {"d3": 3 * odd.block_size}]


async def test_served_names_tell_models_of_one_name_apart() -> None:
    table = Groups(ModelName("ckpt", ("x", "also-x")), ModelName("ckpt", ("y",)))
    leases = [node("d1", "decode", "ckpt", "y"), node("d2", "decode", "elsewhere", "also-x")]
    assert await table.see(*leases) == [{"d2"}, {"d1"}]


async def test_a_served_name_on_one_side_only_is_enough_where_the_files_are_called_alike() -> None:
    table = Groups(ModelName("a", ("mine",)), B)
    assert await table.see(node("d1", "decode", "a"), node("d2", "decode", "b", "nice")) == [{"d1"}, {"d2"}]


@pytest.mark.parametrize(
    "stranger",
    [
        node("s", "decode", "c"),
        node("s", "decode", "ckpt"),
        node("s", "decode", "ckpt", "z"),
        node("s", "decode", "q", "x", "y"),
    ],
    ids=["unknown", "either of two", "neither of two", "both"],
)
async def test_a_node_of_no_model_is_left_alone_and_told_of_once(
    stranger: NodeLease, caplog: pytest.LogCaptureFixture
) -> None:
    table = Groups(ModelName("ckpt", ("x",)), ModelName("ckpt", ("y",)))
    for _ in range(3):
        assert await table.see(stranger, node("d1", "decode", "ckpt", "x")) == [{"d1"}, set()]
    assert list(table.entries) == [("d1", 1)]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        f"node s runs '{(*stranger.served_names, stranger.model)[0]}' and this router serves 'x', 'y'"
    )
    await table.see(node("d1", "decode", "ckpt", "x"))
    await table.see(stranger, node("d1", "decode", "ckpt", "x"))
    assert len(caplog.records) == 2, "it left and came back"


async def test_a_rollout_that_changes_the_fingerprint_ends_at_the_nodes_that_stay() -> None:
    """However many of the old ones are there yet: the only one that decodes takes nothing any more."""
    old = [node("p1", "prefill", "a"), node("p2", "prefill", "a"), node("d1", "decode", "a")]
    new = replace(node("d2", "decode", "a", epoch=2), fingerprint="new")
    table = Groups(A)
    assert await table.see(*old, new) == [{"p1", "p2", "d1", "d2"}]
    assert [group.decodes for group in table.models[0].groups] == [True, True]
    await table.see(*old[:2], replace(old[2], state="draining"), new)
    assert [group.fingerprint for group in table.models[0].usable] == ["new"]
    assert {lease.node_id for lease in table.models[0].leases()} == {"p1", "p2", "d1", "d2"}
