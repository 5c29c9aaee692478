"""The router as a process runs it: real HTTP in front, fake workers behind, ended by signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.main import run_router, serve_router
from kvferry.runtime import graceful_close
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.http import bind
from kvferry.runtime.signals import StopSignal
from tests.fake_workers import Bench, decode, prefill
from tests.waiting import until, until_told

BODY = {"model": "", "prompt": list(range(100, 164)), "max_tokens": 64, "stream": True}


@contextlib.asynccontextmanager
async def router(
    bench: Bench, stop: StopSignal, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """A router on the bench's registry, its client, and its run."""
    sock = bind("127.0.0.1", 0)
    given = RouterSettings(served_model_name=("m",), **settings)
    run = asyncio.create_task(run_router(given, ClusterSecrets(given), bench.store, sock, stop))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
        try:
            async with asyncio.timeout(20):
                while not await _ready(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield client, run
        finally:
            stop.handle(signal.SIGINT)
            await run
            sock.close()


async def _ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/ready?nodes=1")).status_code == 200
    return False


async def test_sigterm_lets_requests_finish() -> None:
    stop = StopSignal()
    async with (
        Bench([prefill(), decode(step_s=0.01)]) as bench,
        router(bench, stop) as (client, run),
        client.stream("POST", "/v1/completions", json=BODY) as response,
    ):
        assert response.status_code == 200
        assert response.headers["x-kvferry-route"].startswith("prefill=p1 decode=d1")
        lines = response.aiter_lines()
        await anext(lines)
        stop.handle(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert await drains(client.base_url) == {
            "/metrics": 200, "/health": 200, "/version": 200, "/ready": 503, "/v1/models": 503, "/v1/completions": 503
        }  # fmt: skip
        assert not run.done()
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await asyncio.wait_for(asyncio.shield(run), 2)


async def _draining(url: httpx.URL) -> None:
    """Returns once new connections are told so."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as other:
        while (await other.get("/ready", headers={"connection": "close"})).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_request_that_was_on_its_way_when_the_router_was_asked_to_end_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a connection that has brought none yet, and over one that rests between two; both are closed behind it."""
    monkeypatch.setattr(graceful_close, "LINGER_S", 2.0)
    stop = StopSignal()
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with Bench([decode()]) as bench, router(bench, stop) as (client, run):
        address = client.base_url.host, client.base_url.port
        fresh, rested, silent = [await asyncio.open_connection(*address) for _ in range(3)]
        rested[1].write(get)
        assert (await rested[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        stop.handle(signal.SIGTERM)
        await _draining(client.base_url)
        for reader, writer in (fresh, rested):
            writer.write(get)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 200"), "it is answered, and the connection ends"
            assert b"connection: close" in answer.lower()
            writer.close()
        await asyncio.wait_for(asyncio.shield(run), 10)
        assert await silent[0].read() == b"", "who says nothing is not waited for"
        silent[1].close()


async def drains(url: httpx.URL) -> dict[str, int]:
    """What a router that drains answers on new connections."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as other:
        scraped = await until_told(other, "kvferry_requests_inflight 1.0")
        assert "kvferry_registry_up 1.0" in scraped
        refused = await other.post("/v1/completions", json=BODY)
        assert (refused.json()["error"]["code"], refused.headers["connection"]) == ("draining", "close")
        assert int(refused.headers["retry-after"]) >= 1
        paths = ("/metrics", "/health", "/version", "/ready", "/v1/models")
        return {path: (await other.get(path)).status_code for path in paths} | {"/v1/completions": refused.status_code}


async def test_a_router_that_drained_leaves_its_port() -> None:
    stop = StopSignal()
    async with Bench([prefill(), decode(step_s=0.01)]) as bench, router(bench, stop) as (client, run):
        stop.handle(signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(run), 5)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=client.base_url, trust_env=False).get("/metrics")


async def test_sigint_does_not_wait_for_long_requests() -> None:
    stop = StopSignal()
    async with Bench([decode(step_s=0.05)]) as bench, router(bench, stop) as (client, run):
        body = BODY | {"max_tokens": 2000}
        with contextlib.suppress(httpx.TransportError):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                stop.handle(signal.SIGINT)
                await asyncio.wait_for(asyncio.shield(run), 5)
        await until(lambda: bench["d1"].running == 0)


async def test_without_redis_it_serves_and_says_that_it_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.router.main")
    settings = RouterSettings(port=0, redis_url="redis://127.0.0.1:1/0", queue_timeout=0.3)
    run = asyncio.create_task(serve_router(settings))
    await until(lambda: run.done() or "router ready at" in caplog.text, 20)
    url = caplog.text.split("router ready at ")[1].split()[0]
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert [(await client.get(f"/ready{asked}")).status_code for asked in ("", "?nodes=1")] == [503, 503]
        assert (await client.get("/ready")).json()["status"].startswith("Redis: ")
        assert (await client.get("/v1/models")).json()["data"][0]["object"] == "model"
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_nodes")
        await until_told(client, "kvferry_registry_up 0.0")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(run, 5)


async def test_mistakes_of_the_user(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            await serve_router(RouterSettings(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError):
        await serve_router(RouterSettings(port=0, redis_url="gopher://x"))
    with pytest.raises(ConfigError):
        await serve_router(RouterSettings(port=0, model=(str(tmp_path / "nothing"),)))
