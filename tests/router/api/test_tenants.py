"""Tenants at the door: their keys, their limits in OpenAI's shape, their part of the prefix cache."""

from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvferry.placement.capacity import Capacity
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, app_of, demo_text, error_of, says, served
from tests.fake_workers import Bench, decode, prefill
from tests.waiting import until


def keys_file(folder: Path, **limits: str) -> str:
    """A file with tenants a and b, whose keys are key-a and key-b."""
    file = folder / "keys.toml"
    file.write_text("".join(f"{entry(name, f'key-{name}')}{limits.get(name, '')}\n" for name in "ab"))
    return str(file)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


async def ask(api: Api, name: str, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/completions", json={"prompt": "Once", **body}, headers=bearer(name))


async def test_a_key_tells_whose_request_it_is(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), api_keys=keys_file(tmp_path), api_key="own")
    assert (await ask(api, "a")).status_code == 200
    assert (await ask(api, "b")).status_code == 200
    own = await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer own"})
    assert own.status_code == 200
    assert [dispatch.spec.call.tenant for dispatch in api.cluster.dispatches] == ["a", "b", ""]
    assert (await api.http.get("/v1/models", headers={"x-api-key": "key-b"})).status_code == 200
    assert (await api.http.get("/v1/models", headers={"x-api-key": "key-c"})).status_code == 401
    wrong = await ask(api, "c")
    assert (wrong.status_code, error_of(wrong)["code"]) == (401, "invalid_api_key")
    assert (await api.http.get("/v1/models")).status_code == 401
    assert (await api.http.get("/health")).status_code == 200
    assert api.sample("kvferry_tenant_tokens_total", tenant="a", kind="prompt") == 1


@pytest.mark.parametrize(("share", "reused"), [(False, False), (True, True)])
async def test_a_cached_prefix_is_its_tenants_own_unless_prefixes_are_shared(
    tmp_path: Path, share: bool, reused: bool
) -> None:
    settings = RouterSettings(api_keys=keys_file(tmp_path), share_prefixes=share)
    prompt = list(range(100, 180))
    async with Bench([prefill(), decode()]) as bench:
        app = app_of(bench.cluster, demo_text(), RouterMetrics(), settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:

            async def cached(name: str, **body: Any) -> int:
                asked = {"prompt": prompt, "max_tokens": 2, **body}
                answer = await http.post("/v1/completions", json=asked, headers=bearer(name))
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            seen: list[tuple[str, ...]] = []
            lookup = bench.cluster.reuse

            async def reuse(hashes: Any, held: Any) -> Any:
                seen.append(tuple(hash_.hex() for own in hashes.values() for hash_ in own))
                return await lookup(hashes, held)

            bench.cluster.reuse = reuse  # type: ignore[method-assign,assignment]
            for name, body in (("a", {}), ("a", {}), ("b", {}), ("a", {"cache_salt": "s"}), ("b", {"cache_salt": "s"})):
                await cached(name, **body)
    first, again, other, salted, other_salted = seen
    assert first
    assert first == again
    assert (first == other) is reused
    assert (salted == other_salted) is reused
    assert salted != first


async def test_requests_a_minute(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), api_keys=keys_file(tmp_path, a="requests_per_minute = 2\n"))
    first, second, third = [await ask(api, "a") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert "x-ratelimit-limit-tokens" not in first.headers
    error = error_of(third)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert 25 <= int(third.headers["retry-after"]) <= 30
    free = await ask(api, "b")
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    assert api.sample("kvferry_requests_refused_total", reason="rate") == 1


async def test_tokens_a_minute_are_settled_by_what_was_used(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), api_keys=keys_file(tmp_path, a="tokens_per_minute = 200\n"))
    answer = await ask(api, "a", max_tokens=100)
    used = answer.json()["usage"]["total_tokens"]
    assert used < 10
    left = await ask(api, "a", max_tokens=100, stream=True)
    assert left.headers["x-ratelimit-limit-tokens"] == "200"
    over = await ask(api, "a", prompt=[5] * 199, max_tokens=100)
    assert (over.status_code, error_of(over)["type"]) == (429, "tokens")
    assert api.cluster.dispatches[-1].spec.call.tenant == "a"
    assert len(api.cluster.dispatches) == 2


async def test_concurrent_requests(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x " * 9), gap_s=0.05), api_keys=keys_file(tmp_path, a="concurrent = 1\n"))
    running = asyncio.create_task(ask(api, "a"))
    await until(lambda: len(api.cluster.dispatches) == 1)
    refused = await ask(api, "a")
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert (await ask(api, "b", max_tokens=1)).status_code == 200
    assert (await running).status_code == 200
    assert (await ask(api, "a", max_tokens=1)).status_code == 200


async def test_one_tenant_does_not_take_all_places_of_the_router(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x " * 20), gap_s=0.05), api_keys=keys_file(tmp_path), max_inflight=8)
    flood = [asyncio.create_task(ask(api, "a")) for _ in range(12)]
    await until(lambda: sum(task.done() for task in flood) >= 7)
    assert (await ask(api, "b", max_tokens=1)).status_code == 200
    statuses = [(await task).status_code for task in flood]
    assert (statuses.count(200), statuses.count(429)) == (4, 8)


async def test_a_flood_waits_in_the_router_and_the_other_does_not(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x " * 10), gap_s=0.01), api_keys=keys_file(tmp_path))
    api.cluster.takes = Capacity(8, 1e9)
    flood = [asyncio.create_task(ask(api, "a")) for _ in range(32)]
    await until(lambda: api.sample("kvferry_requests_queued") == 28)
    assert len(api.cluster.dispatches) == 4
    assert (await ask(api, "b", max_tokens=1)).status_code == 200
    assert api.sample("kvferry_requests_queued") > 0
    assert {(await task).status_code for task in flood} == {200}
    assert api.sample("kvferry_requests_queued") == 0


async def test_a_priority_orders_one_tenants_own() -> None:
    api = Api(FakeCluster(says("x " * 5), gap_s=0.01))
    api.cluster.takes = Capacity(1)
    tasks = [asyncio.create_task(api.complete(user=str(n), priority=-n, prompt=[n + 1])) for n in range(6)]
    assert {(await task).status_code for task in tasks} == {200}
    order = [dispatch.spec.token_ids[0] - 1 for dispatch in api.cluster.dispatches]
    assert order[2:] == sorted(order[2:], reverse=True)
    refused = await api.complete(priority=2**40)
    assert error_of(refused)["param"] == "priority"


def test_the_openai_client_sees_its_limits(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), api_keys=keys_file(tmp_path, a="requests_per_minute = 1\n"))
    with served(api.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=0) as client:
        raw = client.completions.with_raw_response.create(model="SmolLM2-135M-Instruct", prompt="a")
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="SmolLM2-135M-Instruct", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"


async def test_a_target_is_met_or_missed_and_concerns_only_clients_that_wait(tmp_path: Path) -> None:
    cluster = FakeCluster(says("x"))
    api = Api(cluster, api_keys=keys_file(tmp_path, a="ttft_ms = 60000", b="ttft_ms = 1"))

    def count(tenant: str, outcome: str) -> float:
        return api.sample("kvferry_ttft_targets_total", tenant=tenant, outcome=outcome) or 0.0

    assert (await ask(api, "a")).status_code == 200
    assert (count("a", "met"), count("a", "missed")) == (1, 0)
    call = cluster.dispatches[-1].spec.call
    assert call.first_by - call.arrival == pytest.approx(60.0)
    cluster.gap_s = 0.05
    assert (await ask(api, "b", stream=True)).status_code == 200
    assert (count("b", "met"), count("b", "missed")) == (0, 1)
    assert (await ask(api, "b", service_tier="flex")).status_code == 200
    assert cluster.dispatches[-1].spec.call.first_by == inf
    assert count("b", "missed") == 1
    wrong = await ask(api, "b", service_tier="gold")
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "service_tier")


async def test_a_request_that_cannot_meet_its_target_is_rejected_and_counted(tmp_path: Path) -> None:
    cluster = FakeCluster(says("x"), gap_s=2.0)
    cluster.takes = Capacity(1, 1e9)
    api = Api(cluster, api_keys=keys_file(tmp_path, b="ttft_ms = 100"))
    first = asyncio.create_task(ask(api, "b"))
    await until(lambda: cluster.dispatches)
    late = await ask(api, "b")
    assert (late.status_code, error_of(late)["code"]) == (429, "overloaded")
    assert int(late.headers["retry-after"]) >= 1
    assert api.sample("kvferry_ttft_targets_total", tenant="b", outcome="rejected") == 1
    assert (await first).status_code == 200


async def test_patient_requests_keep_others_from_no_slot(tmp_path: Path) -> None:
    """They give way on the nodes, and wait for slots behind the others."""
    cluster = FakeCluster(says("x " * 5), gap_s=0.02)
    cluster.takes = Capacity(1, 1e9)
    api = Api(cluster, api_keys=keys_file(tmp_path, b="ttft_ms = 60000"))
    patient = [asyncio.create_task(ask(api, "a", service_tier="flex")) for _ in range(4)]
    await until(lambda: api.sample("kvferry_requests_queued") == 3)
    assert (await ask(api, "b", max_tokens=1)).status_code == 200
    assert len(cluster.dispatches) == 2
    assert {(await task).status_code for task in patient} == {200}


async def test_the_time_between_tokens_has_a_target_too(tmp_path: Path) -> None:
    """Its outcome is known at the end, also of a client that leaves or has one token."""
    cluster = FakeCluster(says("x y z"), gap_s=0.02)
    api = Api(cluster, api_keys=keys_file(tmp_path, a="itl_ms = 60000", b="itl_ms = 1"))

    def counts(tenant: str) -> list[float]:
        outcomes = ("met", "missed", "rejected")
        return [api.sample("kvferry_itl_targets_total", tenant=tenant, outcome=each) for each in outcomes]

    assert (await ask(api, "a", n=2)).status_code == 200
    assert cluster.dispatches[-1].spec.call.itl_s == 60.0
    assert (await ask(api, "b", stream=True)).status_code == 200
    assert (counts("a"), counts("b")) == ([1, 0, 0], [0, 1, 0])
    for patient in ({"service_tier": "flex"}, {"max_tokens": 1}):
        assert (await ask(api, "b", **patient)).status_code == 200
    assert counts("b") == [0, 1, 0]
    cluster.script = lambda spec: [Overloaded("no node meets the target", retry_after=7.0)]
    late = await ask(api, "b")
    assert (late.status_code, late.headers["retry-after"]) == (429, "7")
    assert counts("b") == [0, 1, 1]
    assert api.sample("kvferry_ttft_targets_total", tenant="b", outcome="rejected") == 0
