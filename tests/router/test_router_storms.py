"""Clients that leave by the dozen, at every moment of their requests: a second later nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Mapping, Sequence

import httpx
import pytest

from kvferry.runtime.signals import StopSignal
from tests.fake_workers import Bench, decode, prefill
from tests.router.test_router_process import router

CLIENTS = 64
IDLE_S = 1.0


def slow_index(bench: Bench) -> None:
    """Give the bench's index the waits of a client library that writes under `asyncio.wait_for`."""
    known = bench.store.longest_prefix

    async def longest_prefix(hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        for _ in range(5):
            await asyncio.wait_for(asyncio.sleep(0), 1)
        return await known(hashes, nodes)

    bench.store.longest_prefix = longest_prefix  # type: ignore[method-assign]


async def leave(port: int, rng: random.Random) -> None:
    """One client: it sends a whole or half a request, reads nothing or a little, and closes or resets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(3, 900) for _ in range(rng.choice((20, 400, 2000)))]
    data = json.dumps({"prompt": prompt, "max_tokens": 2000, "stream": rng.random() < 0.8}).encode()
    kind = rng.choice(("streamed", "early", "half"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data))
    writer.write(data[: len(data) // 2] if kind == "half" else data)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0 if kind == "streamed" else rng.uniform(0, 0.2)):
            for _ in range(rng.randrange(1, 6)):
                await reader.read(2048)
    if rng.random() < 0.3:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()


async def inflight(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("kvferry_requests_inflight "))


@pytest.mark.timeout(60)
async def test_after_a_storm_of_aborts_the_router_is_idle_within_a_second() -> None:
    async with Bench([prefill(), decode(step_s=0.02)]) as bench:
        slow_index(bench)
        async with router(bench, StopSignal()) as (client, _):
            for storm in range(6):
                rng = random.Random(storm)
                await asyncio.gather(*(leave(client.base_url.port or 0, rng) for _ in range(CLIENTS)))
                began = time.monotonic()
                while left := await inflight(client):
                    assert time.monotonic() - began < IDLE_S, f"storm {storm}: {left} requests are left"
                    await asyncio.sleep(0.05)
                answer = await client.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 2})
                assert answer.status_code == 200
