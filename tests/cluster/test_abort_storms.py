"""Clients that leave by the dozen in one phase of their requests: a moment later every process is idle, and anyone
who comes next waits no longer than before. `KVFERRY_TEST_LEAVERS=1000` is the long form.

A tiny model at a set pace: every phase lasts long enough on any machine for clients to leave in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEAVERS = int(os.environ.get("KVFERRY_TEST_LEAVERS", "50"))
AT_ONCE = 125
STEP_S, TOKEN_S = 0.01, 0.0005
"""Seconds that a step of a node lasts at least, and for each prompt token."""
ARGUMENTS = ("--served-model-name", MODEL, "--threads", "1", "--kv-blocks", "2000", "--prefill", "1", "--decode", "1")
IDLE_S = 5.0
"""A second on a machine of one's own; here tests share two cores with much else."""
BUSY = (
    'kvferry_kv_blocks{state="active"', 'kvferry_kv_blocks{state="granted"', "kvferry_requests_waiting ",
    "kvferry_waiting_tokens ", "kvferry_requests_running ", "kvferry_grants_open ", "kvferry_requests_inflight ",
    "kvferry_requests_queued",
)  # fmt: skip


@dataclass(frozen=True)
class Leaving:
    """prompt: tokens; events: until so many at most have come (0: nothing is read); seconds: or so many have passed."""

    prompt: int
    events: int
    seconds: tuple[float, float]
    stream: bool = True


PHASES = {
    "queued": Leaving(200, 0, (0.0, 0.05)),
    "in prefill": Leaving(1500, 0, (0.05, 1.0)),
    "in ship": Leaving(600, 1, (3.0, 3.0)),
    "in decode": Leaving(30, 0, (0.3, 1.5), stream=False),
    "streaming": Leaving(30, 20, (3.0, 3.0)),
}


async def leave(port: int, how: Leaving, rng: random.Random) -> None:
    """Three in ten reset their connection."""
    prompt = rng.choices(range(3, VOCAB), k=how.prompt)
    data = json.dumps({"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": how.stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        async with asyncio.timeout(rng.uniform(*how.seconds)):
            if not how.events:
                await asyncio.sleep(60)
            for _ in range(rng.randrange(how.events) + 1):
                await reader.readuntil(b"data: ")
    if rng.random() < 0.3:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def first_token_s(client: httpx.AsyncClient, rng: random.Random) -> float:
    """Of a neighbour's request."""
    began = time.monotonic()
    body = {"prompt": rng.choices(range(3, VOCAB), k=100), "max_tokens": 3, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        arrivals = [time.monotonic() async for _ in response.aiter_bytes()]
    return arrivals[0] - began


async def busy(client: httpx.AsyncClient, url: str) -> list[str]:
    """What this process still has to do."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return [line for line in lines if line.startswith(BUSY) and not line.endswith(" 0.0")]


async def storms(cluster: LocalCluster) -> list[str]:
    port, found = int(cluster.url.rsplit(":", 1)[1]), []
    urls = [cluster.url, *(lease.http_url for lease in await asyncio.to_thread(cluster.leases))]
    fresh = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed by the node as it is used again
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False, limits=fresh) as client:
        for name, how in PHASES.items():
            rng = random.Random(name)
            before = statistics.median([await first_token_s(client, rng) for _ in range(5)])
            for _ in range(0, LEAVERS, AT_ONCE):
                await asyncio.gather(*(leave(port, how, rng) for _ in range(min(AT_ONCE, LEAVERS))))
            ended = time.monotonic()
            while left := [each for url in urls for each in await busy(client, url)]:
                assert time.monotonic() - ended < IDLE_S, (name, left)
                await asyncio.sleep(0.05)
            idle_s = time.monotonic() - ended
            after = statistics.median([await first_token_s(client, rng) for _ in range(5)])
            found.append(f"{name}: idle after {idle_s:.2f} s, first tokens {before:.2f} s before, {after:.2f} s behind")
    return found


def test_after_a_storm_of_aborts_in_any_phase_all_processes_are_idle(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model", "LlamaConfig", max_position_embeddings=2048)
    with local_cluster("--model", str(path), *ARGUMENTS, step_s=STEP_S, token_s=TOKEN_S) as cluster:
        print("", *asyncio.run(storms(cluster)), sep="\n")
        cluster.settle()
