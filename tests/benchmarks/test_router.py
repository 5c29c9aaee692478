"""The benchmark of the router in a short form: a real router in front of the mock nodes, and what it prints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import placing
from benchmarks.lone_router import lone_router
from benchmarks.router import ROWS, Bench, Row, Sample, measure, report, words_per_token


@pytest.mark.slow
async def test_a_router_is_measured_in_front_of_mock_nodes(tmp_path: Path) -> None:
    async with lone_router(tmp_path) as router:
        bench = Bench(router, await words_per_token(router.target))
        prompts = await bench.sample(Row("prompts", "", 2, 9000, 1, 4), random.Random(1))
        streams = await bench.sample(Row("streams", "", 2, 0, 30, 4, pace_us=500), random.Random(1))
    assert (prompts.tokens, streams.tokens) == (4, 120)
    assert len(prompts.first_s) == len(streams.first_s) == 4
    assert 0 < prompts.cpu_s < 2 * prompts.wall_s
    assert streams.wall_s > 28 * 500e-6, "tokens came at their pace, but where a late one caught up"
    assert not router.process.is_running()


@pytest.mark.slow
async def test_rows_take_turns_and_the_first_does_not_count() -> None:
    text = await measure([Row("few", "a few", 1, 0, 1, 5)], rounds=2)
    assert "| a few |" in text
    assert "ms of CPU in the same rounds" in text


def test_the_table_shows_medians_of_what_a_row_is_for() -> None:
    prompt, stream = ROWS[0], next(row for row in ROWS if row.out > 1)
    turns = [Sample(cpu_s, 2.0, stream.requests * stream.out, (0.001,) * 100) for cpu_s in (0.3, 0.6, 9.0)]
    lines = report({prompt: turns, stream: turns}, [50.0]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[2:-1]] == ["150", "2.00 (1.00)", "", "1.00 ms", "1.00 ms"]
    assert [cell.strip() for cell in lines[3].split("|")[2:4]] == ["", ""]
    assert [cell.strip() for cell in lines[3].split("|")[4:6]] == ["75.0 (37.5)", "1.00 ms"]


@pytest.mark.parametrize("kind", placing.KINDS)
def test_placement_alone_is_timed(kind: str) -> None:
    views = placing.nodes(10, kind)
    assert {view.lease.role for view in views} == {"prefill", "decode"}
    assert (len({view.waiting_tokens for view in views}) == 1) == (kind == "idle")
    found = placing.microseconds(6, kind)
    assert found is not None
    assert 1 < found < 1e6
