"""Policies side by side, plans, and the commands."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.main import kvferry
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.lease import Load, NodeLease, Rates
from kvferry.simulate.calibrate import calibrated, of_model
from kvferry.simulate.compare import POLICIES, case, simulated
from kvferry.simulate.fleet import Shape
from kvferry.simulate.kvferry_policy import KvferryPolicy
from kvferry.simulate.machine import Machine
from kvferry.simulate.mooncake import read_trace
from kvferry.simulate.plan import BUSY, Need, checks, encoding, guess
from kvferry.simulate.plots import goodputs
from kvferry.simulate.progress import SimulationProgress
from kvferry.simulate.results import Figures, Goal, MediaFigures, medians
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams
from kvferry.simulate.world import World


def test_ours_wins_where_sharing_is_high_and_caches_overflow() -> None:
    trace, losses, models = case("many-prefixes", TraceParams(300, 0.5, 1))
    shape = Shape(4, 4, Machine(), models)
    found = {name: simulated(name, shape, trace, Goal(), losses) for name in POLICIES}
    blind = max(found[name].goodput for name in ("round-robin", "least-load", "power-of-two", "scorers"))
    assert found["kvferry"].goodput >= 1.05 * blind
    assert found["kvferry"].hit_rate > 2 * found["round-robin"].hit_rate


def test_ours_does_not_lose_where_nothing_is_shared() -> None:
    trace, losses, models = case("low-sharing", TraceParams(400, 0.5, 1))
    shape = Shape(4, 4, Machine(), models)
    found = {name: simulated(name, shape, trace, Goal(), losses) for name in POLICIES}
    assert found["kvferry"].goodput >= 0.97 * max(each.goodput for each in found.values())


def test_a_large_fleet_goes_faster_than_its_clock() -> None:
    trace, _, models = case("chat", TraceParams(400, 0.2, 1))
    found = simulated("kvferry", Shape(200, 200, Machine(), models), trace, Goal())
    assert found.requests >= 400
    assert found.failed == 0


def test_encode_nodes_take_pictures_from_the_nodes_of_prompts() -> None:
    trace, _, models = case("pictures", TraceParams(400, 0.75, 1))
    shapes = [Shape(8, 8, Machine(), models, encode=encode) for encode in (0, 1, 6)]
    found = [simulated("kvferry", shape, trace, Goal()) for shape in shapes]
    none, one, many = (each.media or MediaFigures(0, 0, 0.0) for each in found)
    assert none.busy == 0 < many.busy < one.busy
    assert found[2].ttft_s[-1] < found[0].ttft_s[-1], "prompts no longer wait for the pictures of others"
    assert 0 < many.encoded < many.tokens, "pictures come again"
    crowded = Shape(8, 8, replace(Machine(), media_cache_tokens=1280), models, encode=6)
    forgetful = simulated("kvferry", crowded, trace, Goal()).media or many
    assert forgetful.encoded > many.encoded
    text, _, models = case("low-sharing", TraceParams(50, 0.5, 1))
    assert simulated("kvferry", Shape(1, 1, Machine(), models, encode=1), text, Goal()).media is None


def test_a_trace_of_recordings_is_encoded_in_half_its_time_where_audio_has_half_the_tokens(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * at, "input_length": 1100, "output_length": 4, "hash_ids": [3 * at, 3 * at + 1],
         "media": [{"id": at, "offset": 10, "audio_s": 30}]} for at in range(30)
    ]  # fmt: skip
    path = tmp_path / "recordings.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = []
    for rate in (25.0, 12.5):
        machine = replace(Machine(), audio_tokens_per_s=rate, media_tokens_per_s=1000.0)
        made = simulated("kvferry", Shape(1, 1, machine, ("m",), encode=1), read_trace(path, machine), Goal())
        assert made.media is not None
        found.append((made.media.encoded, made.ttft_s[0]))
    assert [tokens for tokens, _ in found] == [30 * 750, 30 * 375]
    assert found[0][1] - found[1][1] == pytest.approx(0.375, abs=0.02)


def test_encode_nodes_take_recordings_from_the_nodes_of_prompts() -> None:
    trace, _, models = case("recordings", TraceParams(300, 0.35, 1))
    lengths = [each.length for ask in trace for each in ask.media]
    assert max(lengths) == 750
    slow = replace(Machine(), media_tokens_per_s=2000.0)
    found = [simulated("kvferry", Shape(8, 8, slow, models, encode=encode), trace, Goal()) for encode in (0, 6)]
    assert found[1].ttft_s[-1] < found[0].ttft_s[-1]


def test_what_fits_nowhere_is_refused_before() -> None:
    trace, _, models = case("documents", TraceParams(40, 1.0, 1))
    with pytest.raises(ConfigError, match="KV blocks and a node has 10"):
        simulated("kvferry", Shape(1, 1, replace(Machine(), blocks=10), models), trace, Goal())
    with pytest.raises(ConfigError, match="policy must be one of"):
        simulated("none", Shape(1, 1), trace, Goal())
    with pytest.raises(ConfigError, match="workload must be one of"):
        case("none", TraceParams(1, 1.0))
    with pytest.raises(ConfigError, match="ttft_s"):
        Goal(ttft_s=-1)


def test_a_plan_is_the_least_that_was_found_enough() -> None:
    need, machine, goal = Need(12, 2000, 100, share=0.95), Machine(), Goal()
    tries = list(checks(need, machine, goal, 300, 1))
    prefill, decode, last = tries[-1]
    assert last.share >= 0.95
    assert (prefill, decode) <= guess(need, machine, goal)
    assert any(share.share < 0.95 for *_, share in tries) or (prefill, decode) == (1, 1)


def test_a_plan_counts_the_pages_of_windows() -> None:
    need, goal = Need(200, 2000, 400), Goal()
    plain = Machine(blocks=600)
    windowed = replace(plain, page_blocks=5, window_pages=17)
    assert [windowed.blocks_for(tokens) for tokens in (1, 64, 65, 64 * 17, 64 * 18)] == [6, 6, 12, 17 * 6, 17 * 6 + 1]
    streams = 600 // plain.blocks_for(2400), 600 // windowed.blocks_for(2400)
    assert streams == (15, 4)
    assert guess(need, windowed, goal)[1] > 2 * guess(need, plain, goal)[1]
    with pytest.raises(ConfigError, match="more KV blocks than a node has"):
        guess(need, replace(windowed, blocks=100), goal)


@pytest.mark.parametrize(
    ("need", "goal", "told"),
    [
        (Need(1, 60_000, 10), Goal(1.0, 0.0), "one prompt takes"),
        (Need(1, 100, 10), Goal(itl_s=0.001), "a single stream takes"),
        (Need(1, 250_000, 10), Goal(1e3), "more KV blocks than a node has"),
        (Need(1e12, 100, 10), Goal(), "this needs about .* prefill .*; 4096 of each are simulated at most"),
        (Need(1e308, 100, 1000), Goal(), "and inf decode nodes; 4096"),
    ],
)
def test_a_plan_says_what_cannot_be(need: Need, goal: Goal, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        guess(need, replace(Machine(), context_s=0.0), goal)


def test_images_need_encode_nodes_and_leave_less_of_the_goal() -> None:
    machine, goal = replace(Machine(), media_tokens_per_s=1000.0), Goal(ttft_s=1.0)
    assert encoding(Need(7.0, 500, 100), machine, goal) == (0, goal)
    count, left = encoding(Need(7.0, 500, 100, image_tokens=300), machine, goal)
    load = 7.0 * 0.3 / count
    assert count == math.ceil(7.0 * 0.3 / BUSY)
    assert left.ttft_s == pytest.approx(1.0 - 0.3 * (1 + load / 2 / (1 - load)))
    assert encoding(Need(7.0, 500, 100, audio_s=12.0), machine, goal) == (count, left)
    with pytest.raises(ConfigError, match="the images and audio of one request take"):
        encoding(Need(7.0, 500, 100, image_tokens=900), machine, goal)


def test_leases_of_encode_nodes_give_their_rate_alone() -> None:
    def lease(role: str, blocks: int, encoded: float) -> NodeLease:
        rates = Rates(500.0, 0.02, 2e9, media_tokens_per_s=encoded)
        return NodeLease(role, role, 1, "ready", "", "", "f", "m", 99, 16, 4096, Load(total_blocks=blocks), rates)

    nodes = [lease("prefill", 700, 50.0), lease("decode", 700, 0.0), lease("encode", 9, 80.0), lease("encode", 9, 0.0)]
    machine = calibrated(nodes, Machine())
    assert (machine.blocks, machine.media_tokens_per_s) == (700, 80.0)
    assert calibrated(nodes[:2], Machine()).media_tokens_per_s == 50.0
    assert calibrated(nodes[1:2], Machine()).media_tokens_per_s == Machine().media_tokens_per_s


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
    seeds = ["--seed", "1", "--seed", "2", "--seed", "3"]
    result = CliRunner().invoke(kvferry, [*words, *seeds, "--plot", str(plot)], catch_exceptions=False)
    assert "| bursts | kvferry |" in result.output
    assert result.output.count("requests/s within the goal") == 6
    assert "| workload | kvferry | affinity | of the best other |" in result.output
    assert plot.read_text().count("<rect") == 2 + 4
    assert plot.read_text().count("<path") == 4


def test_several_seeds_are_told_by_their_medians() -> None:
    one = Figures("kvferry", 10, (1.0, 2.0, 3.0), (0.1, 0.2, 0.3), 5.0, 0.5, 0.1, 1.0, 0, 10.0)
    seeds = [one, replace(one, goodput=9.0, ttft_s=(3.0, 3.0, 9.0)), replace(one, goodput=6.0, ttft_s=(2.0, 9.0, 4.0))]
    middle = medians(seeds)
    assert (middle.goodput, middle.ttft_s, middle.itl_s) == (6.0, (2.0, 3.0, 4.0), (0.1, 0.2, 0.3))
    others = {"a": [replace(one, goodput=each) for each in (2.0, 3.0, 8.0)], "b": [replace(one, goodput=4.0)] * 3}
    row = goodputs({"chat": {"kvferry": seeds, **others}}).splitlines()[-1]
    assert row == "| chat | **6.00** | 3.00 | 4.00 | 1.25 (0.75 … 2.25) |"


@pytest.mark.parametrize(
    ("others", "told"),
    [((0.0, 0.0), "inf (inf … inf)"), ((0.0, 2.5), "inf (2.00 … inf)"), ((2.5, 5.0), "1.50 (1.00 … 2.00)")],
)
def test_beside_others_that_never_meet_the_goal_there_is_no_ratio(others: tuple[float, float], told: str) -> None:
    one = Figures("kvferry", 10, (1.0, 2.0, 3.0), (0.1, 0.2, 0.3), 5.0, 0.5, 0.1, 1.0, 0, 10.0)
    seeds = {"kvferry": [one, one], "a": [replace(one, goodput=each) for each in others]}
    assert goodputs({"chat": seeds}).splitlines()[-1].endswith(f" | {told} |")
    nobody = [replace(one, goodput=0.0)]
    assert goodputs({"chat": {"kvferry": nobody, "a": nobody}}).splitlines()[-1].endswith(" | 1.00 |")


def test_what_is_named_twice_is_simulated_once(tmp_path: Path) -> None:
    words = ["--workload", "bursts", "--workload", "bursts", "--policy", "kvferry", "--policy", "kvferry"]
    result = CliRunner().invoke(kvferry, ["simulate", "--requests", "60", *words, "--policy", "affinity"])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.output.count("requests/s within the goal") == 2


def test_a_plot_stays_until_there_is_another(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    plot.write_text("before")
    words = ["simulate", "--workload", "bursts", "--requests", "60", "--kv-blocks", "1", "--plot", str(plot)]
    result = CliRunner().invoke(kvferry, words)
    assert isinstance(result.exception, ConfigError)
    assert plot.read_text() == "before"


def test_how_far_a_simulation_is() -> None:
    said: list[str] = []
    times = iter((0.0, 5.0, 10.0, 10.0, 15.0, 21.0, 21.0))
    pace = SimulationProgress("chat, kvferry", 100, said.append, times.__next__)
    for left in (90, 80, 70, 60):
        pace.report(left)
    assert said == ["chat, kvferry: 20 of 100 requests", "chat, kvferry: 40 of 100 requests"]


def test_the_command_plans() -> None:
    words = ["plan", "--rate", "3", "--prompt", "500", "--output", "20", "--requests", "100", "--share", "0.9"]
    result = CliRunner().invoke(kvferry, words, catch_exceptions=False)
    assert "first estimate" in result.output
    assert result.output.rstrip().endswith("decode nodes")


def lease_of(model: str) -> NodeLease:
    return NodeLease(f"d-{model}", "decode", 1, "ready", "", "", "f", model, 99, 16, 4096, Load(), Rates(1.0, 1.0, 1.0))


def test_rates_of_several_models_are_not_mixed() -> None:
    leases = [lease_of("a"), lease_of("b")]
    with pytest.raises(ConfigError, match="several models, choose one: a, b"):
        of_model(leases, "")
    with pytest.raises(ConfigError, match="model must be one of a, b, not 'c'"):
        of_model(leases, "c")
    assert of_model(leases, "b") == leases[1:]
    assert of_model(leases[:1], "") == leases[:1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workload", "chat", "--workload", "none"], "--workload: workload must be one of low-sharing"),
        (["--policy", "none"], "--policy: policy must be one of kvferry"),
        (["--load", "nan"], "--load: load must be from 1e-06 to 1e.06, not nan"),
        (["--load", "inf"], "--load: load must be from"),
        (["--prefill-rate", "1e308"], "--prefill-rate: prefill_tokens_per_s must be from 1e-09 to 1e.09"),
        (["--kv-blocks", "1000000000000"], "--kv-blocks: blocks must be from 1 to 1e.07"),
        (["--step", "-1"], "--step: step_s must be"),
        (["--itl", "nan"], "--itl: itl_s must be 0 or more"),
        (["--eviction", "none"], "--eviction: eviction must be one of value"),
        (["--plot", "/proc/none/x.svg"], "--plot: /proc/none/x.svg cannot be written"),
        (["--trace", "/proc/none"], "--trace: /proc/none cannot be read"),
        (["--calibrate", "redis://127.0.0.1:1/0"], "--calibrate: Redis: .*127.0.0.1"),
        (["--calibrate", "http://127.0.0.1:1/0"], "--calibrate: redis_url http://127.0.0.1:1/0 cannot be read"),
        (["--probe", "http://127.0.0.1:1"], "--probe: http://127.0.0.1:1 cannot be probed: All connection attempts"),
    ],
)
def test_what_is_wrong_is_said_of_its_flag_before_anything_is_simulated(words: list[str], told: str) -> None:
    result = CliRunner().invoke(kvferry, ["simulate", "--requests", "60", "--workload", "chat", *words]
                                if words[0] != "--trace" else ["simulate", *words])  # fmt: skip
    assert isinstance(result.exception, ConfigError)
    assert re.search(told, result.exception.message), result.exception.message
    assert "within the goal" not in result.output


def test_requests_over_more_than_a_week_are_refused() -> None:
    trace, _, models = case("low-sharing", TraceParams(60, 1e-6, 1))
    with pytest.raises(ConfigError, match="at most 604800 s can be simulated"):
        simulated("kvferry", Shape(1, 1, Machine(), models), trace, Goal())


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        ("0.0000001", "--rate: 100 requests arrive over"),
        ("0.0002", "--rate: 100 requests arrive over"),
        ("1e12", "--rate: this"),
        ("1e308", "--rate: this"),
    ],
)
def test_a_plan_of_what_cannot_be_simulated_ends_at_once(rate: str, told: str) -> None:
    words = ["plan", "--rate", rate, "--prompt", "100", "--output", "10", "--requests", "100", "--seed", "2"]
    result = CliRunner().invoke(kvferry, words)
    assert isinstance(result.exception, ConfigError)
    assert told in result.exception.message


@pytest.mark.parametrize(
    ("shape", "scale", "goal"),
    [(Shape(2, 2), 0.25, Goal()), (Shape(4, 1), 0.28, Goal(itl_s=0.025))],
    ids=["prefill is short", "decode is short"],
)
def test_targets_keep_the_goodput_under_overload(shape: Shape, scale: float, goal: Goal) -> None:
    """At 1.3 times the capacity, with nothing to prefer; without targets nearly all requests are late."""

    def at(load: float, *, targets: bool = True) -> Figures:
        trace, *_ = case("low-sharing", TraceParams(int(700 * load), load * scale, 1))
        return simulated("kvferry", shape, trace, goal, targets=targets)

    usual, crowded, plain = at(1.0), at(1.3), at(1.3, targets=False)
    assert crowded.goodput >= 0.9 * usual.goodput
    assert min(usual.kept, crowded.kept) >= 0.98
    assert crowded.failed > usual.failed
    assert (plain.failed, plain.kept) == (0, plain.share)
    assert plain.goodput < 0.7 * crowded.goodput


@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(4, 1)], ids=["prefill is short", "decode is short"])
def test_a_batch_gives_way_to_requests_with_targets_and_loses_nothing(shape: Shape) -> None:
    """At 1.3 times the capacity, half of it a batch's rows: those who wait are served as if there were no batch."""
    trace, *_ = case("batch-rows", TraceParams(600, 0.33, 1))
    others = [ask for ask in trace if not ask.background]
    hurried = [replace(ask, background=False) for ask in trace]
    goal = Goal(itl_s=0.03)
    alone, beside, equal = (simulated("kvferry", shape, each, goal, targets=True) for each in (others, trace, hurried))
    assert beside.kept >= 0.97
    assert beside.goodput >= 0.95 * alone.goodput
    assert beside.failed <= alone.failed + 0.02 * len(others)
    assert equal.failed > beside.failed + 0.05 * len(trace)


def test_what_gives_way_goes_on_behind_its_tokens() -> None:
    shape, policy = Shape(1, 1, replace(Machine(), max_num_seqs=4)), KvferryPolicy(targets=Goal(itl_s=0.03))
    rows = [TraceRequest(number, 0.0, 600, 400, (), background=True) for number in range(4)]
    late = [TraceRequest(4 + number, 2.0 + number, 600, 40, ()) for number in range(3)]
    world = World(shape, policy, [*rows, *late])
    asyncio.run(world.play())
    gave_way = [run for run in world.runs if run.attempt]
    assert gave_way
    assert all(run.ask.background for run in gave_way)
    assert all(run.delivered == run.ask.output_len and not run.failed for run in world.runs)
    assert max(run.ttft_s for run in world.runs if not run.ask.background) < 1.0
    assert not policy.displaced()


def test_the_command_compares_loads_with_targets() -> None:
    words = ["simulate", "--workload", "low-sharing", "--policy", "kvferry", "--requests", "60", "--targets"]
    result = CliRunner().invoke(kvferry, [*words, "--load", "1", "--load", "1.3"], catch_exceptions=False)
    assert "| low-sharing at 1 | kvferry |" in result.output
    assert "| low-sharing at 1.3 | kvferry |" in result.output
    assert "| kept |" in result.output
