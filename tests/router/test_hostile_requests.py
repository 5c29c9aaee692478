"""Hostile requests by the hundred, by the ten thousand in `make fuzz-api`: no crash, no 5xx, no hang, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import guarded
from kvferry.runtime.http import Server, bind
from tests.api_parts import Api, FakeCluster, says
from tests.hostile_requests import Hostile, hostile
from tests.waiting import until

REQUESTS = int(os.environ.get("KVFERRY_TEST_HOSTILE", "400"))
SEED = int(os.environ.get("KVFERRY_TEST_SEED", "1"))
AT_ONCE = 16
LAST = {"connection": "close"}
ANSWER_S = 30.0
GROWTH = 256 * 2**20
"""Bytes that the process may grow by: its caches fill."""


@dataclass
class Found:
    """Statuses of all answers, and what none may be."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[object] = field(default_factory=list)
    cut: int = 0


async def sent(port: int, request: Hostile, found: Found) -> None:
    """Send one request and look at all that comes back until the server closes or waits."""
    answer = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        for part in request.parts:
            writer.write(part)
            await asyncio.sleep(0.01 if len(request.parts) > 1 else 0)
        if request.leaves_s is not None:
            await asyncio.sleep(request.leaves_s)
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                while part := await reader.read(2**20):
                    answer += part
        except TimeoutError:
            found.wrong.append(("no end", request.told, request.parts, answer[:300]))
            return
        except OSError:  # refused while it still had something to say: the answer came before
            pass
        check(answer, request, found)
    finally:
        writer.transport.abort()


def check(answer: bytes, request: Hostile, found: Found) -> None:
    """Look at the first answer: those behind it are to requests sent ahead."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return
    status = int(head.split(b" ", 2)[1])
    found.statuses[status] += 1
    if status >= 500:
        found.wrong.append((status, request.parts, body[:500]))
    lower = head.lower()
    if status < 400 or b"application/json" not in lower or b"content-length" not in lower or not body:
        return
    length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
    if len(body) < length:  # what the client had still to say crossed it
        found.cut += 1
        return
    error = json.loads(body[:length]).get("error", {})
    if not {"message", "type"} <= error.keys():
        found.wrong.append((status, request.parts, body[:500]))


@pytest.mark.timeout(300 + REQUESTS // 3)
async def test_no_crash_no_5xx_no_hang(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("Yes."), gap_s=0.001), data_dir=str(tmp_path), allow_lora_updates=True)
    limits = Limits(header_s=5, body_s=2, reader_s=5, body_bytes=2**24)
    config = uvicorn.Config(
        api.app, http=guarded(limits), lifespan="off", log_config=None, ws="none", timeout_keep_alive=1
    )
    server, found, rng = Server(config), Found(), random.Random(SEED)
    with bind("127.0.0.1", 0) as sock:
        run = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        port, process = sock.getsockname()[1], psutil.Process()
        requests = iter(hostile(rng) for _ in range(REQUESTS))
        before = 0

        async def client() -> None:
            for request in requests:
                await sent(port, request, found)

        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=ANSWER_S) as honest:
            clients = asyncio.gather(*(client() for _ in range(AT_ONCE)))
            while not clients.done():
                answer = await honest.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=LAST)
                assert answer.status_code == 200
                before = before or process.memory_info().rss
                await asyncio.sleep(0.2)
            await clients
            await until(
                lambda: not server.server_state.connections - {None} or len(server.server_state.connections) <= 1
            )
            await until(lambda: api.sample("kvferry_requests_inflight") == 0)
        assert process.memory_info().rss - before < GROWTH
        server.should_exit = True
        await asyncio.wait_for(run, 10)
    print(f"\n{REQUESTS} hostile requests, seed {SEED}: {dict(sorted(found.statuses.items()))}")
    assert not found.wrong, (len(found.wrong), found.wrong[:3])
    assert found.cut <= 2 + REQUESTS / 100
    assert {200, 400, 404} <= found.statuses.keys()


def test_the_source_says_the_same_for_a_seed_and_stays_small() -> None:
    """What one request damages is no other's: bodies grew from request to request, up to gigabytes."""
    first, second = ([hostile(rng) for _ in range(3000)] for rng in (random.Random(101), random.Random(101)))
    assert first == second
    assert max(sum(map(len, request.parts)) for request in first) < 2**25
