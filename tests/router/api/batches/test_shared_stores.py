"""Several routers over one store, a shared directory or Redis: each has all files and batches, and one goes on where
another died, hung or drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.work import Generate
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, error_of, says
from tests.batch_parts import CHAT, begin, chat, ended, output, rows, upload
from tests.redis_servers import RedisServer, redis_server
from tests.waiting import until

LEASE_S, PERIOD_S = 0.3, 0.05
Routers = Callable[..., Api]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """It has everything again after it was killed and started."""
    with redis_server("--appendonly", "yes") as found:
        yield found


@pytest.fixture(params=["disk", "redis"])
async def routers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Routers]:
    """Makes routers that share a store and leases."""
    leases, made = MemoryRouterLeases(lease_s=LEASE_S), list[Api]()
    shared: dict[str, Any] = {"files_store": request.param, "data_dir": str(tmp_path / "data")}
    if request.param == "redis":
        found: RedisServer = request.getfixturevalue("server")
        with found.client() as client:
            client.flushall()
        shared["redis_url"] = found.url

    def router(script: str = "Yes.", gap_s: float = 0.0, **settings: Any) -> Api:
        owned = RouterOwnership(leases, period_s=PERIOD_S)
        at = Api(FakeCluster(says(script), gap_s=gap_s), owned=owned, **shared, **settings)
        made.append(at)
        return at

    yield router
    for at in made:
        await stop(at)


def ownership(at: Api) -> RouterOwnership:
    owned = at.batches._owners._owned
    assert owned is not None
    return owned


@contextlib.asynccontextmanager
async def alive(at: Api) -> AsyncIterator[None]:
    """The router renews its lease and takes over what others left."""
    async with at.batches:
        await asyncio.sleep(0)
        async with ownership(at).running():
            yield


async def stop(at: Api) -> None:
    """As the kernel stops a process: it releases nothing."""
    tasks = list(at.batches._tasks.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def completed(at: Api, batch_id: str, count: int) -> list[dict[str, Any]]:
    """The output of the batch, which has each row once."""
    batch = await ended(at, batch_id)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = await output(at, batch["output_file_id"])
    assert sorted(row["custom_id"] for row in found) == sorted(f"r{number}" for number in range(count))
    return found


def prompts(at: Api) -> list[tuple[int, ...]]:
    return [tuple(dispatch.spec.token_ids) for dispatch in at.cluster.dispatches]


def many(count: int) -> bytes:
    return rows(*(chat(f"number {number}") for number in range(count)))


async def test_a_file_is_found_through_any_router(routers: Routers) -> None:
    one, other = routers(), routers()
    content = b"".join(b"%07d\n" % number for number in range(90_000))
    made = (await upload(one, content)).json()
    assert (made["bytes"], made["purpose"]) == (len(content), "batch")
    assert (await other.http.get("/v1/files")).json()["data"] == [made]
    assert (await other.http.get(f"/v1/files/{made['id']}")).json() == made
    assert (await other.http.get(f"/v1/files/{made['id']}/content")).content == content
    assert (await other.http.delete(f"/v1/files/{made['id']}")).json()["deleted"]
    assert (await one.http.get(f"/v1/files/{made['id']}/content")).status_code == 404
    assert (await one.http.get("/v1/files")).json()["data"] == []


async def test_room_is_shared_and_given_back(routers: Routers) -> None:
    one, other = routers(files_mib=1), routers(files_mib=1)
    made = (await upload(one, b"x" * 700_000)).json()
    refused = await upload(other, b"x" * 700_000)
    assert refused.status_code == 413
    assert "delete files" in error_of(refused)["message"]
    await one.http.delete(f"/v1/files/{made['id']}")
    assert (await upload(other, b"x" * 700_000)).status_code == 200


async def test_files_have_a_number_too(routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.batch.files.MAX_FILES", 2)
    at = routers()
    answers = [await upload(at, b"") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 413]
    assert "the limit is 2" in error_of(answers[2])["message"]


async def test_another_tenant_finds_nothing(routers: Routers, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("acme", "a") + entry("other", "o"))
    mine, theirs = routers(api_keys=str(keys)), routers(api_keys=str(keys))
    mine.http.headers["authorization"], theirs.http.headers["authorization"] = "Bearer a", "Bearer o"
    begun = await begin(mine, many(2))
    batch = await ended(mine, begun["id"])
    for file_id in (batch["input_file_id"], batch["output_file_id"]):
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert (await mine.http.get(path)).status_code == 200
            assert (await theirs.http.get(path)).status_code == 404
        assert (await theirs.http.delete(f"/v1/files/{file_id}")).status_code == 404
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await theirs.http.post("/v1/batches", json=body)).status_code == 404
    assert (await theirs.http.get(f"/v1/batches/{batch['id']}")).status_code == 404
    assert (await theirs.http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await theirs.http.get(path)).json()["data"] == []
        assert (await mine.http.get(path)).json()["data"] != []


async def test_a_batch_is_seen_and_cancelled_through_another_router(routers: Routers) -> None:
    one, other = routers("one two three four", 0.05, batch_rows=2), routers()
    begun = await begin(one, many(40))
    await until(lambda: len(one.cluster.dispatches) > 4)
    assert (await other.http.get("/v1/batches")).json()["data"][0]["id"] == begun["id"]
    assert (await other.http.post(f"/v1/batches/{begun['id']}/cancel")).json()["status"] == "cancelling"
    batch = await ended(other, begun["id"])
    assert batch["status"] == "cancelled"
    assert len(await output(other, batch["output_file_id"])) == batch["request_counts"]["completed"] < 40
    assert len(one.cluster.dispatches) < 40


async def test_another_router_goes_on_where_one_died(routers: Routers) -> None:
    one, other = routers("Yes.", 0.03, batch_rows=2), routers()
    async with alive(other):
        renewing = asyncio.create_task(ownership(one)._keep())
        begun = await begin(one, many(30))
        await until(lambda: len(one.cluster.dispatches) >= 10)
        assert not other.cluster.dispatches, "its owner lives"
        renewing.cancel()
        await stop(one)
        took = await until(lambda: other.cluster.dispatches)
        assert took < LEASE_S + 4 * PERIOD_S + 1.0
        found = await completed(other, begun["id"], 30)
    assert {row["response"]["body"]["choices"][0]["message"]["content"] for row in found} == {"Yes."}
    assert len(other.cluster.dispatches) < 30, "answered rows are not run again"
    seeds = [_seeds(at) for at in (one, other)]
    again = seeds[0].keys() & seeds[1].keys()
    assert again, "rows in flight are run again"
    assert all(seeds[0][prompt] == seeds[1][prompt] for prompt in again), "with the same tokens"
    assert other.sample("kvferry_batches_resumed_total") == 1
    assert other.sample("kvferry_batch_rows_total", result="ok") == len(other.cluster.dispatches)


def _seeds(at: Api) -> dict[tuple[int, ...], int | None]:
    found = {}
    for dispatch in at.cluster.dispatches:
        assert isinstance(dispatch.spec.work, Generate)
        found[tuple(dispatch.spec.token_ids)] = dispatch.spec.params.seed
    return found


async def test_an_owner_that_wakes_up_finds_out_and_stops(routers: Routers, caplog: pytest.LogCaptureFixture) -> None:
    """Its lease is never renewed, as that of a process that hangs, yet it runs on."""
    one, other = routers("one two three four", 0.05, batch_rows=4), routers("one two three four", 0.05, batch_rows=4)
    begun = await begin(one, many(30))
    await until(lambda: len(one.cluster.dispatches) >= 8)
    with caplog.at_level(logging.WARNING):
        async with alive(other):
            await until(lambda: other.cluster.dispatches)
            await until(lambda: not one.batches._tasks)
            asked = len(one.cluster.dispatches)
            await completed(other, begun["id"], 30)
    assert asked == len(one.cluster.dispatches) < 30
    assert "was taken over by another router" in caplog.text


async def test_a_router_that_drains_leaves_its_batch_to_another(routers: Routers) -> None:
    one, other = routers("one two three", 0.05, batch_rows=2), routers()
    async with alive(other), alive(one):
        begun = await begin(one, many(20))
        await until(lambda: len(one.cluster.dispatches) >= 6)
        ownership(one).drain()
        await one.batches.stop()
        asked = len(one.cluster.dispatches)
        assert await until(lambda: other.cluster.dispatches) < 1.0
        await completed(other, begun["id"], 20)
        assert len(one.cluster.dispatches) == asked
        late = await begin(one, many(2))
        await completed(other, late["id"], 2)


async def test_a_router_without_a_batch_takes_the_next(routers: Routers) -> None:
    busy, idle = routers("one two three four", 0.2, batch_rows=1), routers()
    async with alive(busy):
        await begin(busy, many(20))
        await until(lambda: busy.cluster.dispatches)
        ownership(busy).drain()  # the other one looks first
        async with alive(idle):
            second = await begin(busy, many(3))
            await completed(busy, second["id"], 3)
    assert len(idle.cluster.dispatches) >= 3


async def test_a_batch_that_nobody_owns_is_found(routers: Routers) -> None:
    """As after a loss of all leases, or of an older release's data."""
    one, other = routers(), routers()
    one.batches._stopping = True
    begun = await begin(one, many(3))
    leases: Any = ownership(other)._leases
    leases._tasks.clear()
    async with alive(other):
        await completed(other, begun["id"], 3)


async def test_time_is_up(routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.batch.batch.WINDOW_S", -1)
    at = routers()
    batch = await ended(at, (await begin(at, many(2)))["id"])
    assert batch["status"] == "expired"
    assert {row["error"]["code"] for row in await output(at, batch["error_file_id"])} == {"batch_expired"}


async def test_lines_at_fault_are_named(routers: Routers) -> None:
    at = routers()
    batch = await ended(at, (await begin(at, b"\n".join([many(1), b"{", many(1)])))["id"])
    assert batch["status"] == "failed"
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [
        (2, "invalid_json_line"), (3, "duplicate_custom_id"),
    ]  # fmt: skip
    assert not at.cluster.dispatches
