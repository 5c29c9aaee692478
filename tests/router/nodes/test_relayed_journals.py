"""A router calls the journals' scripts through nodes: through the one that answered last, else through another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.protocol.errors import KvferryError, NodeDown, RegistryFull, RegistryUnavailable
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.relayed_journals import JournalAnswer, JournalCall
from kvferry.protocol.wire import unpack
from kvferry.router.nodes import relayed_journals
from kvferry.router.nodes.relayed_journals import ASKED, RelayedJournalScripts
from tests.router.nodes.test_node_table import D1, D2, P1, Table


class Nodes:
    """Client of nodes, each of which answers or raises."""

    def __init__(self, **answers: object) -> None:
        self.answers: dict[str, Any] = answers
        self.asked: list[str] = []
        self.calls: list[Any] = []

    async def call(self, node: NodeLease, what: str, body: bytes, silence_s: float, opened: None, deliver: Any) -> None:
        assert what == "POST /journals"
        self.asked.append(node.node_id)
        self.calls.append(unpack(body))
        answer = self.answers.get(node.node_id, NodeDown("down"))
        if isinstance(answer, KvferryError):
            raise answer
        if answer is not None:
            deliver(answer)


async def relay(nodes: Nodes, *leases: NodeLease) -> RelayedJournalScripts:
    table = Table(*leases)
    await table.poll()
    for entry in table.entries.values():
        entry.opened()
    return RelayedJournalScripts(table, nodes)  # type: ignore[arg-type]


async def test_arguments_travel_as_the_store_gets_them() -> None:
    nodes = Nodes(p1=JournalAnswer((b"1", b"")))
    assert await (await relay(nodes, P1)).run("append", ["owner", 7, b"\xff"]) == (b"1", b"")
    assert nodes.calls == [JournalCall("append", (b"owner", b"7", b"\xff"))]


async def test_a_node_that_does_not_answer_is_passed_by_from_then_on() -> None:
    nodes = Nodes(d1=JournalAnswer((b"1",)))
    scripts = await relay(nodes, P1, D1)
    for _ in range(8):
        await scripts.run("read", [])
    assert nodes.asked.count("d1") == 8
    assert nodes.asked.count("p1") <= 1


async def test_nodes_that_may_hang_are_asked_last() -> None:
    nodes = Nodes(p1=JournalAnswer(()), d1=JournalAnswer(()), d2=JournalAnswer(()))
    scripts = await relay(nodes, P1, D1, D2)
    for lease in (P1, D1):
        scripts._table.entries[lease.node_id, lease.epoch].suspected = True
    await scripts.run("read", [])
    assert nodes.asked == ["d2"]


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (NodeDown("down"), RegistryUnavailable, "no node relays journals: down"),
        (RegistryFull("full"), RegistryFull, "full"),
        (None, RegistryUnavailable, "gave no answer"),
    ],
)
async def test_at_most_two_nodes_are_asked(answer: object, kind: type[KvferryError], says: str) -> None:
    nodes = Nodes(p1=answer, d1=answer, d2=answer)
    with pytest.raises(kind, match=says):
        await (await relay(nodes, P1, D1, D2)).run("read", [])
    assert len(nodes.asked) == ASKED


async def test_without_nodes_the_store_is_away() -> None:
    with pytest.raises(RegistryUnavailable, match="no node is connected"):
        await (await relay(Nodes())).run("read", [])


class SlowNodes(Nodes):
    """Nodes that answer when they may."""

    def __init__(self, **answers: object) -> None:
        super().__init__(**answers)
        self.may_answer = asyncio.Event()

    async def call(self, node: NodeLease, what: str, body: bytes, silence_s: float, opened: None, deliver: Any) -> None:
        self.asked.append(node.node_id)
        await self.may_answer.wait()
        deliver(self.answers[node.node_id])


async def test_calls_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests that a router began while it was cut off from the store called one node at once."""
    nodes = SlowNodes(p1=JournalAnswer((b"1",)))
    scripts = await relay(nodes, P1)
    calls = [asyncio.create_task(scripts.run("open", [])) for _ in range(100)]
    await asyncio.sleep(0.05)
    assert len(nodes.asked) == 32
    monkeypatch.setattr(relayed_journals, "WAIT_S", 0.01)
    with pytest.raises(RegistryUnavailable, match="32 calls"):
        await scripts.run("open", [])
    nodes.may_answer.set()
    assert await asyncio.gather(*calls) == [(b"1",)] * 100
