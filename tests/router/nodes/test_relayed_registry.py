"""Nodes relay the registry's leases to a router that it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state.lease_seal import LeaseSeal
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import NodeDown
from kvferry.protocol.lease import Load, NodeLease
from kvferry.protocol.relayed_leases import RelayedLeases
from kvferry.protocol.wire import pack
from kvferry.router.nodes import relayed_registry
from kvferry.router.nodes.node_source import LastNodes
from kvferry.router.nodes.relayed_registry import ASKED, LOST_S, PROBED, SILENT_S, RelayedRegistry, SealedLeases
from tests.fake_workers import lease_of
from tests.router.nodes.test_node_table import D1, D2, P1, Table


class Relays:
    """Client of nodes, each of which answers with these records or error."""

    def __init__(self, **answers: list[NodeLease] | Exception) -> None:
        self.answers: dict[str, Any] = answers
        self.asked: list[str] = []
        self.seal: Callable[[NodeLease], bytes] = pack

    async def call(self, node: NodeLease, what: str, body: bytes, silence_s: float, opened: None, deliver: Any) -> None:
        assert (what, body) == ("GET /leases", b"")
        self.asked.append(node.node_id)
        answer = self.answers.get(node.node_id, NodeDown("down"))
        if isinstance(answer, Exception):
            raise answer
        deliver(RelayedLeases(tuple(map(self.seal, answer))))


def relayed(table: Table, relays: Relays, reader: SealedLeases | None = None) -> RelayedRegistry:
    return RelayedRegistry(table, relays, reader or MemoryStore().records)  # type: ignore[arg-type]


async def cut(*leases: NodeLease) -> Table:
    """A table with these nodes, all connected, whose registry has been away for some time."""
    table = Table(*leases)
    await table.poll()
    for entry in table.entries.values():
        entry.opened()
    table.registry.available = False
    await table.poll(after=SILENT_S)
    return table


async def test_a_restarted_node_and_a_new_one_are_learnt_and_absent_ones_stay() -> None:
    table = await cut(P1, D1, D2)
    table[D1].broken(NodeDown("killed"))
    again, new = replace(D1, epoch=2, http_url="http://elsewhere"), lease_of("d3", "decode")
    await relayed(table, Relays(p1=[P1, again, new], d2=[P1]))._ask()
    assert set(table.entries) == {("p1", 1), ("d1", 2), ("d2", 1), ("d3", 1)}
    assert table[again].lease == again
    assert table.changes == 2


async def test_a_node_that_was_lost_before_the_registry_went_away_is_found_at_its_address() -> None:
    """It was cut off until its lease lapsed: no router used it until the registry answered again."""
    table = Table(P1, D1, D2)
    await table.poll()
    for entry in table.entries.values():
        entry.opened()
    relays = Relays(d1=[D1])
    source = relayed(table, relays)
    source._remember()
    table[D1].broken(NodeDown("cut off"))
    await table.poll(P1, D2, after=5.0)
    assert set(table.entries) == {("p1", 1), ("d2", 1)}
    table.registry.available = False
    await table.poll(after=SILENT_S)
    source._remember()
    await source._ask()
    assert set(table.entries) == {("p1", 1), ("d1", 1), ("d2", 1)}
    table.registry.available = True
    await table.poll(after=5.0)
    table.clock.now += LOST_S + 1
    source._remember()
    assert set(source._recent) == {"p1", "d2"}, "it is asked for half a minute"


async def test_older_leases_change_nothing() -> None:
    young = replace(D1, epoch=2)
    table = await cut(P1, young)
    table[young].broken(NodeDown("killed"))
    await relayed(table, Relays(p1=[D1]))._ask()
    assert set(table.entries) == {("p1", 1), ("d1", 2)}


async def test_only_a_silent_registry_has_nodes_asked() -> None:
    table = await cut(P1, D1)
    source = relayed(table, Relays())
    assert source._is_needed
    table.registry.available = True
    await table.poll()
    assert not source._is_needed
    table.clock.now += 0.5
    assert not source._is_needed, "a poll later"


async def test_each_round_asks_few_and_all_that_may_have_restarted_in_turn() -> None:
    nodes = [lease_of(f"d{number}", "decode") for number in range(20)]
    table = await cut(*nodes)
    for lease in nodes[:9]:
        table[lease].broken(NodeDown("killed"))
    relays = Relays()
    source = relayed(table, relays)
    for _ in range(3):
        relays.asked.clear()
        await source._ask()
        assert len(relays.asked) == ASKED + PROBED
    probed = set[str]()
    for _ in range(3):
        relays.asked.clear()
        await source._ask()
        probed |= set(relays.asked[ASKED:])
    assert probed == {lease.node_id for lease in nodes[:9]}


async def test_what_nodes_relay_is_current_and_not_forgotten() -> None:
    table = await cut(P1, D1)
    busy = replace(D1, load=Load(running_requests=3, free_blocks=5, total_blocks=100))
    source = relayed(table, Relays(p1=[busy]))
    for _ in range(20):
        await table.poll()
        await source._ask()
        assert table[D1].lease.load.running_requests == 3
    await table.poll()
    assert table[D1].lease.load.running_requests == 3
    table.clock.now += 10
    await table.poll()
    assert table[D1].lease.load.running_requests == 0, "no relay either"


async def test_a_node_that_no_relay_names_loses_its_load_while_others_keep_theirs() -> None:
    loads = {"running_requests": 3, "free_blocks": 5, "total_blocks": 100}
    table = await cut(P1, replace(D1, load=Load(**loads)), D2)
    source = relayed(table, Relays(p1=[replace(D2, load=Load(**loads))]))
    for _ in range(20):
        await table.poll()
        await source._ask()
    await table.poll()
    assert [table[node].lease.load.running_requests for node in (D1, D2)] == [0, 3]


async def test_what_relays_tell_is_saved_for_the_next_start(tmp_path: Path) -> None:
    table = await cut(P1, D1)
    table._last = LastNodes(tmp_path)
    table[D1].broken(NodeDown("killed"))
    await relayed(table, Relays(p1=[replace(D1, epoch=2)]))._ask()
    await table._last.close()
    assert {(lease.node_id, lease.epoch) for lease in await LastNodes(tmp_path).load()} == {("p1", 1), ("d1", 2)}


async def test_a_draining_node_is_told() -> None:
    table = await cut(P1, D1)
    await relayed(table, Relays(p1=[replace(D1, state="draining")]))._ask()
    assert table[D1].drains


async def test_a_seal_is_needed_and_a_relay_cannot_forge_one() -> None:
    """The forger is a node; without a secret, leases are trusted as the registry's are."""
    keys, forger = Seal(lambda: (b"k" * 32,)), Seal(lambda: (b"f" * 32,))
    table = await cut(P1, D1)
    store = RedisStore("redis://127.0.0.1:1/0", "c", seal=keys)
    reader = store.records
    relays, again = Relays(p1=[replace(D1, epoch=9)]), replace(D1, epoch=2)
    for seal in (pack, LeaseSeal("c", forger, 5.0).sealed, LeaseSeal("another", keys, 5.0).sealed):
        relays.seal = seal
        await relayed(table, relays, reader)._ask()
        assert set(table.entries) == {("p1", 1), ("d1", 1)}
    relays.seal, relays.answers["p1"] = LeaseSeal("c", keys, 5.0).sealed, [again]
    await relayed(table, relays, reader)._ask()
    assert set(table.entries) == {("p1", 1), ("d1", 2)}
    assert store.incompatible == (), "what a relay tells is not the registry's state"
    await store.close()


async def test_a_relay_that_says_nonsense_hides_no_other() -> None:
    table = await cut(P1, D1, D2)
    table[D1].broken(NodeDown("killed"))
    again = replace(D1, epoch=2)
    await relayed(table, Relays(p1=[replace(D2, block_size=0)], d2=[again]))._ask()
    assert ("d1", 2) in table.entries
    assert table[D2].lease == D2


async def test_a_relay_that_answers_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent, so only the time of the whole answer ends it; what others relay counts."""
    monkeypatch.setattr(relayed_registry, "ANSWER_S", 0.2)
    table = await cut(P1, D1, D2)
    table[D1].broken(NodeDown("killed"))
    relays = Relays(d2=[replace(D1, epoch=2)])

    class Dripping(Relays):
        async def call(self, node: NodeLease, *args: Any) -> None:
            if node.node_id == "p1":
                await asyncio.sleep(60)
            await relays.call(node, *args)

    async with asyncio.timeout(20):
        await relayed(table, Dripping())._ask()
    assert ("d1", 2) in table.entries


async def test_an_unforeseen_error_of_one_relay_costs_no_other() -> None:
    table = await cut(P1, D1, D2)
    table[D1].broken(NodeDown("killed"))
    await relayed(table, Relays(p1=ValueError("unforeseen"), d2=[replace(D1, epoch=2)]))._ask()
    assert ("d1", 2) in table.entries
