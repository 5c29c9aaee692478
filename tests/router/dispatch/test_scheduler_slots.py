"""Equal idle nodes take turns, whatever the shape of the cluster; and a request is placed once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import kvferry.router.dispatch.model_cluster
from benchmarks import placing
from kvferry.placement.place import place_among
from kvferry.placement.types import Demand, NodeView, Placement
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.lease import Load
from kvferry.router.dispatch import pending_requests
from tests.fake_workers import PROMPT, Bench, collect, decode, prefill

SHAPES = [(1, 2), (2, 1), (2, 2), (3, 2), (4, 4), (0, 2), (0, 3)]


def cluster(prefills: int, decodes: int) -> Bench:
    return Bench([prefill(f"p{i}") for i in range(prefills)] + [decode(f"d{i}") for i in range(decodes)])


def works(bench: Bench, role: str) -> list[int]:
    """Attempts that each node of a role has had."""
    return [len(w.prefills if role == "prefill" else w.jobs) for w in bench.workers.values() if w.role == role]


def even(counts: list[int]) -> bool:
    return max(counts, default=0) - min(counts, default=0) <= 1


@pytest.mark.parametrize(("prefills", "decodes"), SHAPES)
async def test_one_request_after_another(prefills: int, decodes: int) -> None:
    async with cluster(prefills, decodes) as bench:
        for count in range(1, 13):
            await collect(bench.start(2))
            assert even(works(bench, "prefill"))
            assert even(works(bench, "decode"))
            assert sum(works(bench, "decode")) == count


@pytest.mark.parametrize(("prefills", "decodes"), SHAPES)
async def test_all_at_once(prefills: int, decodes: int) -> None:
    async with cluster(prefills, decodes) as bench:
        prompts = [(100 + i, *PROMPT[1:]) for i in range(12)]  # of which none is another's prefix
        await asyncio.gather(*(collect(bench.start(3, prompt)) for prompt in prompts))
        assert even(works(bench, "prefill"))
        assert even(works(bench, "decode"))


async def test_requests_that_need_one_role_only_do_not_disturb_the_turns() -> None:
    """Every second request ends on prefill."""
    async with cluster(2, 2) as bench:
        for _ in range(8):
            await collect(bench.start(2))
            await collect(bench.start(1))
        assert works(bench, "prefill") == [8, 8]
        assert works(bench, "decode") == [4, 4]


async def test_a_request_is_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = []

    def counted(groups: list[tuple[Demand, list[NodeView]]]) -> Placement:
        placed.extend(groups)
        return place_among(groups)

    monkeypatch.setattr(kvferry.router.dispatch.model_cluster, "place_among", counted)
    async with cluster(2, 2) as bench:
        for count in range(1, 5):
            await collect(bench.start(2))
            assert len(placed) == count


async def test_a_full_cluster_refuses_without_placing_and_without_asking_its_nodes(monkeypatch) -> None:
    monkeypatch.setattr(pending_requests, "MAX_WAITING", 0)
    full = Load(active_blocks=100, total_blocks=100, waiting_tokens=1400)
    async with Bench([decode(f"d{i}", changes={"load": full}) for i in range(3)]) as bench:
        entries, members = bench.nodes.entries, bench.cluster.model.members
        bench.nodes.entries, bench.cluster.model.members = {}, []
        try:
            with pytest.raises(Overloaded):
                bench.start(2)
        finally:
            bench.nodes.entries, bench.cluster.model.members = entries, members


async def test_of_hundreds_of_idle_nodes_each_has_its_turn() -> None:
    """Through the router's own table: 250 equal nodes, each chosen as often as any."""
    model = await placing.cluster(250, "idle")
    chosen: Counter[str] = Counter()
    for _ in range(2 * 125):
        placement = model.place(Demand(1000), {})
        for node in (placement.prefill, placement.decode):
            assert node
            chosen[node.node_id] += 1
            model.nodes.entries[node.node_id, node.epoch].reserve(1000, 0, lambda error: None).release()
    assert set(chosen.values()) == {2}
    assert len(chosen) == 250
