"""The node table over a registry that fails, forgets and changes, on a clock of the test."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.model_files.model_name import ModelName
from kvferry.protocol.errors import NodeLost
from kvferry.protocol.lease import IncompatibleLease, Load, NodeLease, Rates
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.nodes.capacity_summary import NodeCapacity
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_entry import NodeEntry
from kvferry.router.nodes.node_table import NodeTable
from tests.fake_workers import lease_of


class Registry:
    incompatible: tuple[IncompatibleLease, ...] = ()

    def __init__(self, *leases: NodeLease) -> None:
        self.leases, self.available = list(leases), True

    async def nodes(self) -> list[NodeLease]:
        if not self.available:
            raise OSError("away")
        return list(self.leases)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Table(NodeTable):
    """With its registry, clock and metrics at hand; `changes` counts what listeners heard."""

    clock: Clock

    def __init__(self, *leases: NodeLease) -> None:
        self.registry, self.clock, self.metrics, self.changes = Registry(*leases), Clock(), RouterMetrics(), 0
        super().__init__(self.registry, self.metrics, clock=self.clock)
        self.model = self.add(ModelNodes(ModelName("m")))
        self.listen(self._heard)

    def _heard(self) -> None:
        self.changes += 1

    async def poll(self, *leases: NodeLease, after: float = 0.5) -> None:
        self.clock.now += after
        if leases:
            self.registry.leases = list(leases)
        await self.refresh()

    def ids(self) -> set[str]:
        return {entry.lease.node_id for entry in self.model.members}

    def __getitem__(self, lease: NodeLease) -> NodeEntry:
        return self.entries[(lease.node_id, lease.epoch)]

    def count(self, role: str, state: str) -> float:
        return float(self.metrics.nodes.labels(role, state, "m")._value.get())


P1, D1, D2 = lease_of("p1", "prefill"), lease_of("d1", "decode"), lease_of("d2", "decode")


def groups(table: Table) -> dict[str, set[str]]:
    """Ids by fingerprint."""
    return {each.fingerprint: {entry.key[0] for entry in each.members} for each in table.model.groups}


def fail(error: NodeLost) -> None:
    raise AssertionError(error)


async def test_nodes_come_and_go() -> None:
    table, told = Table(P1, D1, D2), []
    await table.poll()
    assert table.ids() == {"p1", "d1", "d2"}
    table[D2].reserve(0, 1, told.append)
    table[D1].reserve(0, 1, fail)
    await table.poll(P1, D1)
    assert table.ids() == {"p1", "d1"}
    assert "d2" in str(told[0])
    assert table.changes == 2
    assert ("d2", 1) not in table.entries


async def test_a_new_epoch_is_another_node() -> None:
    table, told = Table(D1), []
    await table.poll()
    table[D1].reserve(0, 1, told.append)
    await table.poll(replace(D1, epoch=2))
    assert len(told) == 1
    assert ("d1", 1) not in table.entries
    assert ("d1", 2) in table.entries


async def test_a_registry_that_went_back_in_time_takes_no_node_whose_stream_flows() -> None:
    """After a failover to a replica that lagged, a lease of the process before may live for seconds."""
    new = replace(D1, epoch=2)
    table, told = Table(new), []
    await table.poll()
    table[new].reserve(0, 1, told.append)
    table[new].linked = True
    for _ in range(8):
        await table.poll(D1)
    assert list(table.entries) == [("d1", 2)]
    assert not told
    assert table[new].lease.epoch == 2
    table[new].linked = False
    await table.poll(D1)
    assert list(table.entries) == [("d1", 1)], "a clock was set back, and the registry lost its epochs"
    assert len(told) == 1


async def test_draining_is_not_lost() -> None:
    table = Table(D1)
    await table.poll()
    table[D1].reserve(0, 1, fail)
    await table.poll(replace(D1, state="draining"))
    assert table.ids() == {"d1"}
    assert (table.count("decode", "ready"), table.count("decode", "draining")) == (0, 1)
    assert table.changes == 2


async def test_registry_away_keeps_the_nodes_and_forgets_their_load() -> None:
    table = Table(replace(D1, load=Load(waiting_tokens=900, running_requests=9, active_blocks=50, total_blocks=50)))
    await table.poll()
    table.registry.available = False
    for _ in range(20):
        await table.poll()
    assert not table.registry_health.up
    assert table.metrics.registry_up._value.get() == 0
    view = table.model.members[0].view
    assert (view.waiting_tokens, view.streams, view.lease.load.free_blocks) == (0, 0, 50)


async def test_a_registry_that_refuses_is_told_of_once_and_asked_ever_less(caplog: pytest.LogCaptureFixture) -> None:
    """Also before any node was known, when the table asks often."""
    caplog.set_level("INFO", "kvferry.router.nodes.registry_health")
    table = Table()
    table.registry.available = False
    pauses = []
    for _ in range(20):
        await table.poll()
        pauses.append(table.pause_s)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.2
    assert pauses[-1] == 2.0
    table.registry.available = True
    await table.poll(P1)
    assert table.pause_s == pytest.approx(0.1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    table.registry.available = False
    await table.poll()
    assert len(caplog.records) == 3


async def test_registry_that_comes_back_empty_is_not_believed_at_once() -> None:
    table, told = Table(P1, D1, D2), []
    await table.poll()
    table[D1].reserve(0, 1, told.append)
    table.registry.available = False
    await table.poll()
    table.registry.available, table.registry.leases = True, []
    await table.poll()
    await table.poll(P1)
    assert table.ids() == {"p1", "d1", "d2"}
    await table.poll(P1, D1)
    assert told == []
    await table.poll(after=3.0)
    assert table.ids() == {"p1", "d1"}


async def test_registry_that_lost_everything_between_two_polls() -> None:
    table = Table(P1, D1)
    await table.poll()
    table.registry.leases = []
    for _ in range(3):
        await table.poll()
    assert table.ids() == {"p1", "d1"}
    for _ in range(8):
        await table.poll()
    assert table.ids() == set()
    assert table.entries == {}


async def test_nodes_of_several_fingerprints_are_all_in_use(caplog: pytest.LogCaptureFixture) -> None:
    def other(lease: NodeLease, epoch: int) -> NodeLease:
        return replace(lease, fingerprint="new", epoch=epoch)

    table, d3 = Table(P1, D1, D2), other(lease_of("d3", "decode"), 3)
    with caplog.at_level("INFO", "kvferry.router.nodes.model_nodes"):
        await table.poll(P1, D1, other(D2, 2))
        assert groups(table) == {"fp": {"p1", "d1"}, "new": {"d2"}}
        assert [table.count("decode", state) for state in ("ready", "incompatible")] == [2, 0]
        table[D1].reserve(0, 1, fail)
        await table.poll(P1, D1, other(D2, 2), d3)
        assert groups(table) == {"fp": {"p1", "d1"}, "new": {"d2", "d3"}}
        await table.poll(D1, other(P1, 4), other(D2, 2), d3)
    assert groups(table) == {"fp": {"d1"}, "new": {"p1", "d2", "d3"}}
    told = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert told == [f"m has nodes of fingerprint {each} (kvferry)" for each in ("fp", "new")]


async def test_a_node_may_get_another_fingerprint_while_it_lives() -> None:
    """As one does whose engine behind the adapter is replaced."""
    table = Table(P1, D1)
    await table.poll()
    await table.poll(P1, replace(D1, fingerprint="new"))
    assert groups(table) == {"fp": {"p1"}, "new": {"d1"}}


async def test_groups_that_can_decode_are_the_usable_ones() -> None:
    table = Table()
    await table.poll(P1, lease_of("p2", "prefill"), replace(D1, fingerprint="other"))
    assert [group.fingerprint for group in table.model.usable] == ["other"]
    await table.poll(P1, replace(D1, fingerprint="other", state="draining"))
    assert [group.fingerprint for group in table.model.usable] == ["fp", "other"], "better than none"


async def test_the_group_whose_first_node_started_last_is_known_by_that_node_when_others_restart() -> None:
    table, new = Table(), replace(D2, fingerprint="new", epoch=5)
    await table.poll(P1, D1, new)
    await table.poll(P1, replace(D1, epoch=6), new)
    await table.poll(replace(P1, epoch=7), replace(D1, epoch=6), new)
    assert {group.fingerprint: group.first_epoch for group in table.model.groups} == {"fp": 1, "new": 5}


async def test_a_stream_outranks_the_lease() -> None:
    table, told = Table(P1, replace(D1, load=Load(total_blocks=10, free_blocks=7))), []
    await table.poll()
    table[D1].opened()
    table[P1].opened()
    table[D1].reserve(0, 1, told.append)
    for _ in range(20):
        await table.poll(P1)
    assert table.ids() == {"p1", "d1"}
    assert table[D1].lease.load.free_blocks == 10, "what is not renewed is not reckoned with"
    table[D1].pause()
    await table.poll(P1)
    assert table.ids() == {"p1", "d1"}
    table[D1].broken(NodeLost("silent"))
    await table.poll(P1)
    assert table.ids() == {"p1"}
    assert told


async def test_suspicion_passes() -> None:
    table = Table(P1)
    await table.poll()
    table[P1].opened()
    table.suspect(table[P1])
    assert table.breakers.open().nodes == {("p1", 1)}
    table.clock.now += 2.1
    assert not table.breakers.open().nodes


async def test_bookings_count_at_once_and_once() -> None:
    table = Table(P1, D1)
    await table.poll()
    prefill = table[P1].reserve(500, 0, fail)
    decode = table[D1].reserve(0, 30, fail)

    def seen(**load: Any) -> tuple[int, int, int]:
        p, d = table[P1].view, table[D1].view
        return (p.waiting_tokens, d.pending_blocks, d.streams)

    assert seen() == (500, 30, 1)
    await table.poll(
        replace(P1, load=Load(waiting_tokens=450)), replace(D1, load=Load(granted_blocks=30, total_blocks=99))
    )
    assert seen() == (500, 30, 1)
    await table.poll(replace(P1, load=Load(waiting_tokens=1500)), D1)
    assert seen() == (1500, 30, 1)
    prefill.settle()
    decode.settle()
    assert seen() == (1000, 0, 1)
    prefill.release()
    decode.release()
    decode.release()
    assert seen() == (1000, 0, 0)


BROKEN = [
    {"block_size": 0},
    {"block_size": -4},
    {"load": None},
    {"load": Load(waiting_tokens=-1)},
    {"rates": Rates(step_s=float("nan"))},
    {"rates": Rates(prefill_tokens_per_s=float("inf"))},
    {"role": "both"},
    {"epoch": "1"},
    {"http_url": 5},
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_lease_that_makes_no_sense_is_left_out_and_the_others_are_followed(broken: dict[str, Any]) -> None:
    good, bad = lease_of("d1", "decode"), replace(lease_of("d2", "decode"), **broken)
    table = Table(good)
    await table.refresh()
    table[good].opened()
    await table.poll(good, bad)
    await table.poll(replace(good, state="draining"), bad, lease_of("p1", "prefill"))
    table[P1].opened()
    assert table.ids() == {"d1", "p1"}
    assert table.model.capacity.total == NodeCapacity(prefills=1)


async def test_a_node_whose_lease_makes_no_sense_any_more_stays_as_it_was_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lease = lease_of("d1", "decode", load=Load(total_blocks=10, free_blocks=7))
    table = Table(lease)
    await table.refresh()
    entry = table[lease]
    for _ in range(20):
        await table.poll(replace(lease, load=Load(active_blocks=-1)))
    assert table[lease] is entry
    assert entry.lease == lease
    assert sum("invalid lease" in record.message for record in caplog.records) == 1


async def test_following_the_registry_outlives_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    table = NodeTable(Registry(lease_of("d1", "decode")), RouterMetrics(), poll_s=0.01)
    table.add(ModelNodes(ModelName("m")))
    calls = []

    def changed() -> None:
        calls.append(len(table.entries))
        raise RuntimeError("boom")

    await table.start()
    table.listen(changed)
    try:
        for number in range(2, 5):
            table._source.leases.append(lease_of(f"d{number}", "decode"))  # type: ignore[attr-defined]
            async with asyncio.timeout(2):
                while len(calls) < number - 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
    finally:
        await table.stop()
    assert calls[:3] == [2, 3, 4]


async def test_nodes_of_another_wire_version_are_named_once_counted_and_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a rolling upgrade one by one changes over."""
    table = Table(lease_of("d1", "decode"), lease_of("d2", "decode"))
    await table.poll(lease_of("d1", "decode"), lease_of("d2", "decode"))
    table.registry.incompatible = (IncompatibleLease("d2", "decode", "speaks wire version 99 and this process 9"),)
    for _ in range(3):
        await table.poll(lease_of("d1", "decode"))
    said = [record.getMessage() for record in caplog.records if "wire version" in record.getMessage()]
    (line,) = said
    assert line == "node d2 speaks wire version 99 and this process 9: not used"
    assert {key[0] for key in table.entries} == {"d1"}
    count = table.metrics.registry.get_sample_value
    assert count("kvferry_nodes", {"role": "decode", "state": "incompatible", "model_name": ""}) == 1
    assert count("kvferry_nodes", {"role": "decode", "state": "ready", "model_name": "m"}) == 1
    table.registry.incompatible = ()
    await table.poll(lease_of("d1", "decode"), lease_of("d2", "decode", 2))
    assert count("kvferry_nodes", {"role": "decode", "state": "incompatible", "model_name": ""}) == 0
    assert ("d2", 2) in table.entries


async def test_a_node_that_takes_the_other_role_is_the_same_node_in_the_other_pool() -> None:
    table = Table(P1, D1)
    await table.refresh()
    entry = table[P1]
    entry.opened()
    assert table.model.capacity.total == NodeCapacity(prefills=1)
    await table.poll(replace(P1, role="decode"), D1)
    assert table[P1] is entry
    assert table.changes == 2
    assert (table.count("prefill", "ready"), table.count("decode", "ready")) == (0, 2)
    assert (table.model.capacity.total.prefills, table.model.capacity.total.decodes) == (0, 1)
    await table.poll(P1, D1)
    assert (table.model.capacity.total.prefills, table.model.capacity.total.decodes) == (1, 0)
