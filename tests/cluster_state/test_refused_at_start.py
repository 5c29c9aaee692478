"""A Redis that does not let a process in when it starts: it waits, tells why, and goes on once it is let in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvferry.cli.preflight import check_redis
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.main import serve_router
from tests.redis_servers import RedisServer, redis_server
from tests.toy import make_engine
from tests.waiting import until
from tests.worker_pair import worker

RIGHT = "the right one"


@pytest.fixture
def guarded() -> object:
    with redis_server("--requirepass", RIGHT) as server:
        yield server


@asynccontextmanager
async def router(settings: RouterSettings, log: pytest.LogCaptureFixture) -> AsyncIterator[httpx.AsyncClient]:
    log.set_level("INFO", "kvferry.router.main")
    run = asyncio.create_task(serve_router(settings))
    await until(lambda: run.done() or "router ready at" in log.text, 60)
    assert not run.done(), run.exception()
    async with httpx.AsyncClient(base_url=log.text.split("router ready at ")[1].split()[0], trust_env=False) as client:
        yield client
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(run, 30)


def refusals(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "refuses this" in record.getMessage()]


async def test_a_router_waits_until_the_password_is_right(
    guarded: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    password.write_text("a wrong one")
    settings = RouterSettings(port=0, redis_url=guarded.url, redis_password_file=str(password))
    async with router(settings, caplog) as client:
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "password" in ready.json()["status"]
        assert str(guarded.port) not in ready.text, "whoever asks is not told where Redis is"
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(3)
        assert len(refusals(caplog)) == 1, "a line each ten seconds"
        password.write_text(RIGHT)
        async with asyncio.timeout(60):
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        guarded.kill()
        await until(lambda: "registry does not answer" in caplog.text, 60)
        assert (await client.get("/ready")).status_code == 200, "what it knew of nodes it still knows"


async def test_a_node_waits_until_it_is_let_in(
    guarded: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    password.write_text("a wrong one")
    store = RedisStore(guarded.url, "test", password_file=str(password))
    async with worker("decode", make_engine(), store=store, state="joining") as node:  # type: ignore[arg-type]
        await until(lambda: node.node.metrics.lease_renewals["failed"]._value.get() >= 5, 60)
        async with httpx.AsyncClient(trust_env=False, base_url=node.node.address.url) as client:
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert "not registered" in ready.json()["reason"]
            assert "password" in ready.json()["reason"]
            assert (await client.get("/health")).status_code == 200
            assert len(refusals(caplog)) == 1, "a line each ten seconds"
            password.write_text(RIGHT)
            await until(lambda: node.node.state == "ready", 60)
            assert (await client.get("/ready")).json()["ready"]


def test_serve_and_doctor_still_say_so_in_one_line(guarded: RedisServer) -> None:
    with pytest.raises(ConfigError, match=r"refuses: .*docs/redis.md"):
        check_redis(RouterSettings(redis_url=guarded.url))
