"""A simulation with the rates of a real cluster tells about the times to first token that this has.

The machine that runs the tests is not quiet, so the bounds are wide; the figures are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import httpx
import pytest
from local_cluster import MODEL, LocalCluster, local_cluster

from placement.costs import HANDOFF_S
from simulate.ask import Ask
from simulate.calibrate import calibrated
from simulate.fleet import Shape
from simulate.machine import Machine
from simulate.ours import Ours
from simulate.workloads import hashes_of
from simulate.world import World

PAIRS, BUSY, APART = 10, 0.4, 3.0
"""Requests come two at a time, so that every second one waits; prompts keep their node busy for such a share of its
time; and measured and simulated medians may be so many times apart."""


async def first_token_s(url: str, prompt: list[int], output: int) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    first_s = 0.0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as got,
    ):
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {") and not first_s:
                first_s = time.monotonic() - began
    return first_s


async def measured(url: str, trace: list[Ask]) -> list[float]:
    source = random.Random(3)

    async def one(ask: Ask) -> float:
        prompt = source.choices(range(1000, 40_000), k=ask.prompt_len)
        await asyncio.sleep(ask.at)
        return await first_token_s(url, prompt, ask.output_len)

    return list(await asyncio.gather(*map(one, trace)))


def machine_of(cluster: LocalCluster) -> Machine:
    """As `kvferry simulate --calibrate` takes it."""
    leases = cluster.leases()
    return calibrated(leases, Machine(attention_len=8192, context_s=0.0, chunk_tokens=64))


@pytest.mark.slow
def test_a_simulation_resembles_a_cluster_that_runs() -> None:
    source = random.Random(2)
    lengths = [source.randrange(200, 600) for _ in range(2 * PAIRS)]
    with local_cluster("--prefill", "1", "--decode", "1") as cluster:
        asyncio.run(measured(cluster.url, [Ask(0, 0.0, 500, 8, ()), Ask(1, 0.0, 400, 8, ())]))
        rate = machine_of(cluster).prefill_tokens_per_s
        apart_s = 2 * statistics.mean(lengths) / rate / BUSY
        trace = [
            Ask(i, apart_s * (i // 2), length, 8, hashes_of([(f"p{i}", length + 8)], 16))
            for i, length in enumerate(lengths)
        ]
        real = asyncio.run(measured(cluster.url, trace))
        machine = machine_of(cluster)
    world = World(Shape(1, 1, machine), Ours(), trace)
    asyncio.run(world.play())
    told = [run.ttft_s for run in world.runs]
    for name, of in (
        ("p50", statistics.median),
        ("mean", statistics.mean),
        ("p90", lambda s: sorted(s)[int(0.9 * len(s))]),
    ):
        print(f"TTFT {name}: measured {of(real):.3f} s, simulated {of(told):.3f} s, {of(told) / of(real):.2f} times")
    assert statistics.median(told) > HANDOFF_S
    assert 1 / APART < statistics.median(told) / statistics.median(real) < APART
