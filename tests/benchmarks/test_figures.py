"""From samples to tables: percentiles, ceilings, ratios and goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import limits, serving
from benchmarks.load import Completion
from benchmarks.models import SOURCE, gguf_format
from benchmarks.serving import parse, report
from benchmarks.subjects import ENGINES, SUBJECTS, Installed, missing
from benchmarks.table import GOALS, LIMIT, Results, as_json, markdown, number, reached, times_as_good
from benchmarks.workloads import FIGURES, Figure, gaps, output_rate, percentile
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.memory_needs import config_needs, gguf_needs
from kvferry.model_files.source import DEMO_MODEL, resolve
from kvferry.model_files.weight_counts import ON_CPU

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


def test_ceilings_are_the_limits_over_what_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = config_needs({"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10})
    monkeypatch.setattr(serving, "gguf_needs", lambda header: needs)
    monkeypatch.setattr(serving, "read_gguf", lambda path: None)
    taken = Results()
    taken.limits |= {("bf16", limits.READ): [3.0, 4.0, 5.0], ("bf16", limits.PRODUCTS): [7.0]}
    ceilings = serving._ceilings("bf16", taken, {SOURCE: Path("m.gguf")})
    assert ceilings["bf16", "single"] == pytest.approx(4e9 / needs.step_bytes(2))
    assert ceilings["bf16", "prefill512"] == pytest.approx(7e9 / needs.prompt_work(512))


def test_the_demo_model_is_weighed() -> None:
    demo = resolve(DEMO_MODEL, weights=False).path
    assert gguf_format(demo) == "q4_1"
    needs = gguf_needs(read_gguf(demo))
    assert (needs.dense.weights, needs.embedding.weights) == (106168320, 49152 * 576)
    assert needs.step_bytes(2, ON_CPU) < demo.stat().st_size


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
