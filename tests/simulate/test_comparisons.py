"""Policies side by side, plans, and the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import kvferry
from protocol.errors import ConfigError
from protocol.lease import Load, NodeLease, Rates
from simulate.calibrate import calibrated
from simulate.compare import POLICIES, case, simulated
from simulate.figures import Goal
from simulate.fleet import Shape
from simulate.machine import Machine
from simulate.plan import Need, checks, guess
from simulate.workloads import Asked


def test_ours_wins_where_sharing_is_high_and_caches_overflow() -> None:
    trace, losses, models = case("many-prefixes", Asked(700, 0.5, 1))
    shape = Shape(4, 4, Machine(), models)
    found = {name: simulated(name, shape, trace, Goal(), losses) for name in POLICIES}
    blind = max(found[name].goodput for name in ("round-robin", "least-load", "power-of-two", "scorers"))
    assert found["kvferry"].goodput >= 1.2 * blind
    assert found["kvferry"].hit_rate > 2 * found["round-robin"].hit_rate


def test_ours_does_not_lose_where_nothing_is_shared() -> None:
    trace, losses, models = case("low-sharing", Asked(600, 0.5, 1))
    shape = Shape(4, 4, Machine(), models)
    found = {name: simulated(name, shape, trace, Goal(), losses) for name in POLICIES}
    assert found["kvferry"].goodput >= 0.97 * max(each.goodput for each in found.values())


def test_a_large_fleet_goes_faster_than_its_clock() -> None:
    trace, _, models = case("chat", Asked(400, 0.2, 1))
    found = simulated("kvferry", Shape(200, 200, Machine(), models), trace, Goal())
    assert found.requests >= 400
    assert found.failed == 0


def test_what_fits_nowhere_is_refused_before() -> None:
    trace, _, models = case("documents", Asked(40, 1.0, 1))
    with pytest.raises(ConfigError, match="KV blocks and a node has 10"):
        simulated("kvferry", Shape(1, 1, replace(Machine(), blocks=10), models), trace, Goal())
    with pytest.raises(ConfigError, match="policy must be one of"):
        simulated("none", Shape(1, 1), trace, Goal())
    with pytest.raises(ConfigError, match="workload must be one of"):
        case("none", Asked(1, 1.0))
    with pytest.raises(ConfigError, match="ttft_s"):
        Goal(ttft_s=-1)


def test_a_plan_is_the_least_that_was_found_enough() -> None:
    need, machine, goal = Need(12, 2000, 100, share=0.95), Machine(), Goal()
    tries = list(checks(need, machine, goal, 300, 1))
    prefill, decode, last = tries[-1]
    assert last.share >= 0.95
    assert (prefill, decode) <= guess(need, machine, goal)
    assert any(share.share < 0.95 for *_, share in tries) or (prefill, decode) == (1, 1)


@pytest.mark.parametrize(
    ("need", "goal", "told"),
    [
        (Need(1, 60_000, 10), Goal(1.0, 0.0), "a prompt alone takes"),
        (Need(1, 100, 10), Goal(itl_s=0.001), "a stream alone takes"),
        (Need(1, 250_000, 10), Goal(1e3), "more KV blocks than a node has"),
    ],
)
def test_a_plan_says_what_cannot_be(need: Need, goal: Goal, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        guess(need, replace(Machine(), context_s=0.0), goal)


def test_leases_give_the_rates() -> None:
    def lease(role: str, rate: float, step_s: float) -> NodeLease:
        load = Load(running_requests=3, total_blocks=777)
        return NodeLease(role, role, 1, "ready", "", "", "f", "m", 99, 16, 4096, load, Rates(rate, step_s, 2e9), (), 32)

    machine = calibrated([lease("prefill", 500.0, 9.0), lease("decode", 100.0, 0.022)], Machine())
    assert (machine.prefill_tokens_per_s, machine.ship_bytes_per_s) == (500.0, 2e9)
    assert (machine.block_size, machine.block_bytes, machine.blocks, machine.max_num_seqs) == (16, 4096, 777, 32)
    assert machine.decode_s(3, 0) == pytest.approx(0.022)
    with pytest.raises(ConfigError, match="no decode node"):
        calibrated([lease("prefill", 1.0, 1.0)], Machine())


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    words = ["simulate", "--workload", "bursts", "--policy", "kvferry", "--policy", "affinity", "--requests", "60"]
    result = CliRunner().invoke(kvferry, [*words, "--plot", str(plot)], catch_exceptions=False)
    assert "| bursts | kvferry |" in result.output
    assert "requests/s within the goal" in result.output
    assert plot.read_text().count("<rect") == 5


def test_the_command_plans() -> None:
    words = ["plan", "--rate", "3", "--prompt", "500", "--output", "20", "--requests", "100", "--share", "0.9"]
    result = CliRunner().invoke(kvferry, words, catch_exceptions=False)
    assert "guess by arithmetic" in result.output
    assert result.output.rstrip().endswith("decode nodes")


def test_the_command_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(kvferry, ["simulate", "--trace", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)
