"""A short plan, seeded: mock engines, their adapters and two routers, killed, frozen and cut off under load."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.chaos.engines import EngineShape
from tests.chaos.plan import BESIDE_ENGINES, ENGINE, ENGINES, NODES, PREFILLS, Roster, make_plan
from tests.chaos.report import summary, table
from tests.chaos.run import Settings, run
from tests.chaos.shape import Shape

KINDS = (
    *("kill engine", "freeze engine", "kill part of engine", "kill", "drain"),
    *("cut from redis", "kill router", "clients leave"),
)
EXCUSED = 0.02
"""Of requests: see test_chaos.py."""


def test_a_plan_for_engines_disturbs_one_engine_or_its_node_at_a_time() -> None:
    kinds = (*BESIDE_ENGINES, *ENGINE)
    shape = Shape(Path(), engines=EngineShape())
    plan = make_plan(3, 1200, 3.0, kinds, shape.roster)
    assert {fault.kind for fault in plan} == set(kinds)
    assert not {fault.target for fault in plan} & set(PREFILLS)
    taken = [fault for fault in plan if fault.target in (*NODES, *ENGINES)]
    for fault, after in itertools.pairwise(taken):
        if shape.roster.node(fault.target) != shape.roster.node(after.target):
            assert after.at_s >= fault.at_s + fault.seconds
    assert not {fault.target for fault in make_plan(3, 1200, 3.0, ("kill",), Roster())} & set(ENGINES)


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_engines_and_adapters_die_and_no_token_changes(tmp_path: Path) -> None:
    shape = Shape(tmp_path, model="smollm2", engines=EngineShape())
    figures = summary(await run(shape, Settings(5, 26.0, 8, 3.0, 4.0, 64, KINDS, bodies=20), print))
    print(table(figures))
    assert figures["faults"] >= 4
    assert figures["requests"] >= 20
    assert (figures["changed"], figures["changes"]) == (0, [])
    assert (figures["leaked"], figures["books"], figures["violations"], figures["health"]) == (0, [], 0, [])
    assert sum(figures["errors_by_kind"].values()) <= figures["requests"] * EXCUSED, figures["errors_by_kind"]
    for phase, storm in figures["disconnects"].items():
        assert storm["idle_s"] is not None, (phase, storm)
        assert storm["idle_s"] <= 5, (phase, storm)
