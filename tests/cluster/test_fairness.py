"""Two tenants of a real cluster: one floods, and waits; the other does not wait with it."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import httpx
import pytest

from kvferry.router.tenants.keys import entry
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, value

FLOOD, STEADY = 24, 6
SETTLE_S = 3.0
STEP_S = 0.02
"""Seconds that a step lasts at least, of a tiny model: a flood lasts as long as it takes with any."""
TRIES = 3
"""Others may compute on the machine while either is measured."""


async def first_token_s(http: httpx.AsyncClient, name: str, prompt: int, output: int) -> float:
    """Seconds to the first event of a stream."""
    body = {"prompt": [1000 + (time.monotonic_ns() + i) % 30000 for i in range(prompt)], "max_tokens": output}
    body |= {"stream": True, "ignore_eos": True}
    began, first = time.monotonic(), 0.0
    headers = {"authorization": f"Bearer key-{name}"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - began
    return first


async def waits(url: str) -> tuple[list[float], list[float]]:
    """Of the flood and of the steady tenant, while the flood is on."""
    flooded: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as http:

        async def client() -> None:
            while True:
                flooded.append(await first_token_s(http, "flood", 48, 24))

        tasks = [asyncio.create_task(client()) for _ in range(FLOOD)]
        await asyncio.sleep(SETTLE_S)
        steady = [await first_token_s(http, "steady", 48, 4) for _ in range(STEADY)]
        while len(flooded) < FLOOD:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return flooded, steady


async def alone_and_flooded(url: str) -> tuple[list[float], list[float]]:
    """Seconds to the steady tenant's first tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as http:

        async def steady() -> list[float]:
            return [await first_token_s(http, "steady", 256, 4) for _ in range(STEADY)]

        async def client() -> None:
            while True:
                await first_token_s(http, "flood", 64, 64)

        alone = (await steady())[1:]
        tasks = [asyncio.create_task(client()) for _ in range(FLOOD)]
        await asyncio.sleep(SETTLE_S)
        flooded = await steady()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return alone, flooded


@pytest.mark.slow
def test_streams_of_a_flood_stand_still_for_a_prompt_on_their_cores(tmp_path: Path) -> None:
    """With the defaults: a prefill and a decode process on the same cores. It took three times as long as alone."""
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("flood", "key-flood") + entry("steady", "key-steady"))
    with local_cluster("--api-keys", str(keys)) as cluster:
        for _ in range(TRIES):
            alone, flooded = asyncio.run(alone_and_flooded(cluster.url))
            if statistics.median(flooded) < 2 * statistics.median(alone):
                break
        else:
            pytest.fail(f"beside the flood {flooded}, alone {alone}")
        cluster.settle()


@pytest.mark.slow
def test_a_flood_delays_itself(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("flood", "key-flood") + entry("steady", "key-steady"))
    path = save_checkpoint(tmp_path / "model", "LlamaConfig", vocab_size=49_152)
    seats = ("--prefill", "0", "--max-num-seqs", "8", "--threads", "1")
    cluster: LocalCluster
    with local_cluster("--model", str(path), *seats, "--api-keys", str(keys), step_s=STEP_S) as cluster:
        flooded, steady = asyncio.run(waits(cluster.url))
        assert statistics.median(steady) < 0.5 * statistics.median(flooded), (steady, flooded)
        assert value(scrape(cluster.url), "kvferry_turn_wait_seconds_count") >= FLOOD / 2
        cluster.settle()
