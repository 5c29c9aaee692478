"""From samples to tables: percentiles, ceilings, ratios and goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.limits import Cost, model_cost
from benchmarks.load import Completion
from benchmarks.models import gguf_format
from benchmarks.serving import parse, report
from benchmarks.subjects import ENGINES, SUBJECTS, Installed, missing
from benchmarks.table import GOALS, LIMIT, Results, as_json, markdown, number, reached, times_as_good
from benchmarks.workloads import FIGURES, Figure, gaps, output_rate, percentile
from model_files.source import DEMO_MODEL, resolve

NAMES = {subject.name for subject in SUBJECTS}


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 5), (0.99, 10), (1.0, 10), (0.51, 6)])
def test_percentile(share: float, expected: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == expected


def test_gaps_are_those_of_the_time_asked_for() -> None:
    done = [Completion(0.0, (1.0, 2.0, 4.0, 8.0), 4), Completion(0.0, (3.5,), 1)]
    assert gaps(done, 0.0, 9.0) == [1.0, 2.0, 4.0]
    assert gaps(done, 2.5, 3.0) == [2.0]


def test_the_output_rate_of_several_streams_is_over_the_time_of_all() -> None:
    done = [Completion(0.0, (1.0, 2.0), 6), Completion(1.0, (1.5, 4.0), 6)]
    assert output_rate(done) == 3.0


def test_goals_name_subjects_and_figures_that_exist() -> None:
    for goal in GOALS:
        assert goal.subject in NAMES
        assert goal.figure in FIGURES[goal.workload]
        assert isinstance(goal.against, float) or goal.against in NAMES | {LIMIT}
    for subject in SUBJECTS:
        assert set(subject.workloads) <= set(FIGURES)
        assert subject.engine in ENGINES


def test_less_is_better_for_a_latency() -> None:
    assert times_as_good(Figure("", "ms"), 50, 100) == 2
    assert times_as_good(Figure("", "tokens/s", rises=True), 50, 100) == 0.5


def test_goals_are_judged_by_medians_and_ceilings() -> None:
    results = Results(ceilings={("bf16", "single"): 200.0})
    for value in (150.0, 170.0, 400.0):
        results.add("kvferry:bf16", "single", {"tokens_per_s": value})
    results.add("llama.cpp:bf16", "single", {"tokens_per_s": 100.0})
    results.add("kvferry:bf16", "start", {"ready_s": 10.0})
    found = {(goal.workload, goal.against): ratio for goal, _, _, ratio in reached(results)}
    assert found == {("single", LIMIT): 0.85, ("single", "llama.cpp:bf16"): 1.7, ("start", 5.0): 0.5}


def test_a_report_with_one_subject_and_no_limits() -> None:
    results = Results({"cpu": "a cpu", "threads": 2, "memory_gb": 24, "load": 0.1})
    results.add("kvferry:bf16", "start", {"ready_s": 4.0})
    text = report(results, [subject for subject in SUBJECTS if subject.name == "kvferry:bf16"])
    assert "start to ready, s" in text
    assert "| yes |" in text
    assert json.loads(as_json(results))["samples"] == {"kvferry:bf16 start ready_s": [4.0]}


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.5, "1,234"), (99.96, "100.0"), (12.34, "12.3"), (0.126, "0.13")]
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_markdown_is_aligned() -> None:
    lines = markdown(("a", "bb"), [("ccc", "1"), ("d", "234")]).splitlines()
    assert lines == ["| a   |  bb |", "| --- | --: |", "| ccc |   1 |", "| d   | 234 |"]


def test_ceilings() -> None:
    cost = Cost(dense=100, head=50, bytes=75, attention=2)
    assert cost.decode_ceiling(read=3e-6) == 40
    assert cost.decode_ceiling(read=3e-6, bytes_per_weight=2) == 10
    work = 2 * 100 * 3 + 4 * 2 * 6 + 2 * 50
    assert cost.prefill_ceiling(gflops=work * 1e-9, length=3) == pytest.approx(3)


def test_the_demo_model_is_weighed() -> None:
    demo = resolve(DEMO_MODEL, weights=False).path
    assert gguf_format(demo) == "q4_1"
    cost = model_cost(demo)
    assert (cost.dense, cost.head, cost.attention) == (106168320, 49152 * 576, 30 * 576)
    assert cost.bytes < demo.stat().st_size


def test_a_peer_that_is_not_there_is_left_out_with_a_reason() -> None:
    installed = Installed(None, None, 2)
    models = dict.fromkeys(("bf16", "safetensors", "source"), Path("/nowhere"))
    reasons = {s.name: missing(s, models, installed) for s in SUBJECTS}
    assert reasons["kvferry:bf16"] is None
    assert "--llama-server" in str(reasons["llama.cpp:bf16"])
    assert "--vllm-python" in str(reasons["vllm:bf16"])
    assert "no q4_0 model" in str(reasons["kvferry:q4_0"])


def test_every_engine_gets_the_threads_and_the_port() -> None:
    installed = Installed(Path("llama-server"), Path("/venv/bin/python"), 3)
    for subject in SUBJECTS:
        launch = ENGINES[subject.engine](subject, Path("/model"), installed, 4567)
        assert {"4567", "/model"} <= set(launch.argv)
        assert "3" in (*launch.argv, launch.env.get("OMP_NUM_THREADS"))


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "single,nosuch"])
    assert "no workload nosuch" in capsys.readouterr().err
    assert parse(["--quick"]).runs == 1
