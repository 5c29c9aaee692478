"""Long bodies at a router that has streams to feed: answered or refused, and the streams keep their rhythm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvferry.runtime.signals import StopSignal
from tests.fake_workers import Bench, decode, prefill
from tests.router.test_router_process import router
from tests.waiting import until_told

MIB = 2**20
GAP_S = 1.5
"""The event loop's longest, beside what else the machine does; twenty seconds had been seen."""
FITS = ("\n" + " " * 80) * 3900
"""3,900 tokens, 316 kB: the longest that the demo model has."""


@contextlib.asynccontextmanager
async def rhythm() -> AsyncIterator[list[float]]:
    """The longest gap of the event loop, in seconds, once it ended."""
    longest, ended = [0.0], asyncio.Event()

    async def beat() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    beating = asyncio.create_task(beat())
    try:
        yield longest
    finally:
        ended.set()
        await beating


async def posted(client: httpx.AsyncClient, data: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    response = await client.post(path, content=data, headers={"content-type": "application/json"}, timeout=30)
    body = response.json()
    return response.status_code, body.get("error", body)


def body(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 2, **fields}).encode()


def text(size: int) -> str:
    return "river stone cloud market " * (size // 25)


def chat(content: str) -> bytes:
    return body(messages=[{"role": "user", "content": content}])


@pytest.mark.timeout(120)
async def test_long_bodies_do_not_stop_the_router() -> None:
    async with Bench([prefill(), decode()]) as bench, router(bench, StopSignal()) as (client, _):
        for path, data, status, code in [
            ("/v1/completions", body(prompt=text(20 * MIB)), 413, "request_too_large"),
            ("/tokenize", body(prompt=text(20 * MIB)), 413, "request_too_large"),
            ("/v1/completions", body(prompt=text(15 * MIB)), 400, "context_length_exceeded"),
            ("/v1/completions", body(prompt=text(300_000)), 400, "context_length_exceeded"),
            ("/v1/chat/completions", chat(text(15 * MIB)), 400, "context_length_exceeded"),
            ("/v1/completions", body(prompt=[7] * 200_000), 400, "context_length_exceeded"),
            ("/v1/completions", body(prompt=[7] * 2 * MIB), 400, "invalid_request_error"),
            ("/v1/completions", body(prompt="a", more=[[]] * 2 * MIB), 400, "invalid_request_error"),
            ("/v1/completions", body(prompt="a", stop_token_ids=["x"] * 500_000), 400, "invalid_request_error"),
            ("/tokenize", body(prompt=text(2 * MIB)), 400, "invalid_request_error"),
            ("/v1/completions", body(prompt=FITS), 200, None),
            ("/v1/completions", body(prompt=text(MIB - 100), truncate_prompt_tokens=100), 200, None),
            ("/tokenize", body(prompt=text(MIB - 100)), 200, None),
        ]:  # fmt: skip
            async with rhythm() as longest:
                found, answer = await posted(client, data, path)
            name = (path, len(data), data[:60])
            assert (found, answer.get("code")) == (status, code), (name, answer)
            if code == "context_length_exceeded":
                assert "maximum context length" in answer["message"]
            assert longest[0] < GAP_S, (name, longest)
        await until_told(client, "kvferry_requests_inflight 0.0")


async def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes() -> None:
    async with Bench([decode()]) as bench, router(bench, StopSignal()) as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n{")
        async with asyncio.timeout(2):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        writer.close()
