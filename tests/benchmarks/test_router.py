"""The benchmark of the router in a short form: a real router in front of the mock nodes, and what it prints."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks import placing, servers
from benchmarks.load import Target
from benchmarks.lone_router import lone_router
from benchmarks.mock_http import HOST
from benchmarks.mock_nodes import MODEL
from benchmarks.peer_router import peer_router
from benchmarks.router import OURS, PEER, lag_p99, measure, report
from benchmarks.router_rows import ROWS, Bench, Row, Sample, closed_loop, words_per_token


@pytest.mark.slow
async def test_a_router_is_measured_in_front_of_mock_nodes(tmp_path: Path) -> None:
    async with lone_router(tmp_path) as router:
        bench = Bench(router, await words_per_token(router.target))
        prompts = await bench.sample(Row("prompts", "", 2, 9000, 1, 4, prefix=8000), random.Random(1))
        streams = await bench.sample(Row("streams", "", 2, 0, 30, 4, pace_us=500), random.Random(1))
    assert (prompts.tokens, streams.tokens) == (4, 120)
    assert len(prompts.first_s) == len(streams.first_s) == 4
    assert 0 < prompts.cpu_s < 2 * prompts.wall_s
    assert streams.wall_s > 14 * 500e-6, "tokens came at their pace, but where late ones caught up"
    assert max(streams.lag) == float("inf"), "the router tells how late its loop was"
    assert not router.process.is_running()


@pytest.mark.slow
async def test_rows_take_turns_and_the_first_does_not_count() -> None:
    text = await measure([Row("few", "a few", 1, 0, 1, 5)], rounds=2)
    assert "| a few |" in text
    assert "ms of CPU in the same rounds" in text


async def test_a_mock_worker_answers_completions() -> None:
    port = servers.free_port()
    command = [sys.executable, "-m", "benchmarks.mock_openai", str(port)]
    worker = await asyncio.create_subprocess_exec(*command, cwd=servers.ROOT, stdin=asyncio.subprocess.PIPE)
    try:
        url = f"http://{HOST}:{port}"
        async with httpx.AsyncClient(trust_env=False, transport=httpx.AsyncHTTPTransport(retries=10)) as client:
            assert (await client.get(f"{url}/v1/models")).json()["data"][0]["id"] == MODEL
        done = await closed_loop(Target(url, MODEL), ["ten words"] * 3, Row("few", "", 2, 0, 5, 3))
        assert [completion.tokens for completion in done] == [5, 5, 5]
    finally:
        assert worker.stdin
        worker.stdin.close()
        assert await worker.wait() == 0


@pytest.mark.skipif(not shutil.which(PEER), reason="vllm-router is not installed")
async def test_the_peer_is_measured_beside(tmp_path: Path) -> None:
    command = shutil.which(PEER)
    assert command
    async with peer_router(Path(command), tmp_path) as router:
        sample = await Bench(router, 1.0).sample(Row("few", "", 2, 0, 5, 4), random.Random(1))
    assert sample.tokens == 20


def test_the_table_shows_medians_of_what_a_row_is_for() -> None:
    prompt, stream = ROWS[0], next(row for row in ROWS if row.shows == "tokens")
    late = {0.001: 98, 0.002: 99, float("inf"): 100}
    turns = [Sample(cpu_s, 2.0, stream.requests * stream.out, (0.001,) * 100, late) for cpu_s in (0.3, 0.6, 9.0)]
    lines = report({(OURS, prompt): turns, (OURS, stream): turns, (PEER, prompt): turns}, [50.0]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:5]]
    assert cells[0] == ["", "500 requests", "2.00 (1.00)", "", "1.00 ms", "1.00 ms", "1 to 2 ms"]
    assert cells[1] == [stream.goal, "13,333 tokens", "", "75.0 (37.5)", "1.00 ms", "1.00 ms", "1 to 2 ms"]
    assert lines[4].startswith(f"| {PEER}: ")


def test_a_router_that_does_not_tell_its_lag_has_none() -> None:
    assert lag_p99([{}, {}]) == ""


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.prefix < row.prompt for row in ROWS if row.prefix)


@pytest.mark.parametrize("kind", placing.KINDS)
async def test_placement_alone_is_timed(kind: str) -> None:
    model = await placing.cluster(10, kind)
    leases = [entry.lease for entry in model.model.members]
    assert {lease.role for lease in leases} == {"prefill", "decode"}
    assert (len({lease.load.waiting_tokens for lease in leases}) == 1) == (kind == "idle")
    assert len(await placing.choices_ms(10, kind, 5)) == 5


async def test_questions_to_the_index_are_counted() -> None:
    taken, commands = await placing.redis_cost(nodes=10, rows=1000)
    assert len(taken) == placing.LOOKUPS
    assert 2 < commands < 60
