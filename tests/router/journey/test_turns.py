"""Equal idle nodes take turns, whatever the shape of the cluster; and a request is placed once."""

from __future__ import annotations

import asyncio

import pytest
from fake_workers import Bench, collect, decode, prefill

import router.journey.model_cluster
from placement.terms import Demand, NodeView, Placement
from protocol.errors import Overloaded
from protocol.lease import Load

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
        await asyncio.gather(*(collect(bench.start(3)) for _ in range(12)))
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

    def counted(demand: Demand, nodes: list[NodeView]) -> Placement:
        placed.append(demand)
        return place(demand, nodes)

    place = router.journey.model_cluster.place
    monkeypatch.setattr(router.journey.model_cluster, "place", counted)
    async with cluster(2, 2) as bench:
        for count in range(1, 5):
            await collect(bench.start(2))
            assert len(placed) == count


async def test_a_full_cluster_refuses_without_placing_and_without_asking_its_nodes() -> None:
    full = Load(active_blocks=100, total_blocks=100, waiting_tokens=1400)
    async with Bench([decode(f"d{i}", changes={"load": full}) for i in range(3)]) as bench:
        entries, members = bench.nodes.entries, bench.cluster.group.members
        bench.nodes.entries, bench.cluster.group.members = {}, []
        try:
            with pytest.raises(Overloaded):
                bench.start(2)
        finally:
            bench.nodes.entries, bench.cluster.group.members = entries, members
