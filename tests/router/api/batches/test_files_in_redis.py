"""Files and batches in Redis: what only this store does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.router.batch import redis_held
from tests.api_parts import Api, FakeCluster, error_of, says
from tests.batch_parts import begin, chat, ended, output, rows, upload
from tests.redis_servers import RedisServer, redis_server
from tests.waiting import until


@pytest.fixture(scope="module")
def persistent() -> Iterator[RedisServer]:
    with redis_server("--appendonly", "yes") as found:
        yield found


@pytest.fixture
def server(persistent: RedisServer) -> RedisServer:
    with persistent.client() as client:
        client.flushall()
    return persistent


def router(server: RedisServer, cluster: FakeCluster | None = None, **settings: Any) -> Api:
    return Api(cluster or FakeCluster(says("Yes.")), files_store="redis", redis_url=server.url, **settings)


async def test_while_redis_is_away_rows_wait_and_go_on(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_held, "MAX_WAIT_S", 0.2)
    at = router(server, FakeCluster(says("one two three four"), gap_s=0.03), batch_rows=3)
    begun = await begin(at, rows(*(chat(f"{number}") for number in range(24))))
    await until(lambda: len(at.cluster.dispatches) > 8)
    server.kill()
    try:
        for path in ("/v1/files", "/v1/batches", f"/v1/batches/{begun['id']}", f"/v1/files/{begun['input_file_id']}"):
            answer = await at.http.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "registry_unavailable"), answer.text
            assert error_of(answer)["message"].startswith("files and batches are unavailable now: Redis")
        assert (await upload(at, b"{}")).status_code == 503
        assert (await at.http.post(f"/v1/batches/{begun['id']}/cancel")).status_code == 503
        asked = len(at.cluster.dispatches)
        await asyncio.sleep(0.5)
        assert len(at.cluster.dispatches) <= asked + 3
    finally:
        server.start()
    batch = await ended(at, begun["id"])
    assert batch["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
    assert len({row["custom_id"] for row in await output(at, batch["output_file_id"])}) == 24
    assert len(at.cluster.dispatches) == 24, "no row was run twice"


async def test_answers_that_exceed_the_limit_end_the_batch(server: RedisServer) -> None:
    at = router(server, FakeCluster(says("word " * 300)), files_mib=1, batch_rows=32)
    content = rows(*(chat(f"{number}", logprobs=True, top_logprobs=5) for number in range(40)))
    batch = await ended(at, (await begin(at, content))["id"])
    assert batch["status"] == "failed"
    assert "delete files that are not needed" in batch["errors"]["data"][0]["message"]
    for _ in range(200):  # what it had used is free again, a moment later
        if (answer := await upload(at, b"x" * 900_000)).status_code == 200:
            break
        await asyncio.sleep(0.05)
    assert answer.status_code == 200


async def test_a_server_that_may_lose_files_is_named(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with router(server).batches:
        await asyncio.sleep(0.1)
    assert "files and batches are in Redis, but" not in caplog.text
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as careless:
        async with router(careless).batches:
            await until(lambda: "set appendonly to yes" in caplog.text)
    assert "set maxmemory-policy to noeviction instead of allkeys-lru" in caplog.text


async def test_nothing_but_records_stays_of_an_ended_batch(server: RedisServer) -> None:
    at = router(server)
    batch = await ended(at, (await begin(at, rows(chat("a"), chat("b", temperature=-1))))["id"])
    for file_id in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]):
        assert (await at.http.get(f"/v1/files/{file_id}")).json()["expires_at"] > batch["created_at"]
        assert (await at.http.delete(f"/v1/files/{file_id}")).status_code == 200
    with server.client() as client:
        keys: Any = client.keys()
        kinds = sorted(key.decode().rpartition(":")[2].partition("#")[2] or "batch" for key in keys)
        assert kinds == ["batch", "batches", "sizes"]
        (sizes,) = [key for key in keys if key.endswith(b"#sizes")]
        assert client.hgetall(sizes) == {b"": b"0"}
        assert all(client.ttl(key) > 0 for key in keys)
