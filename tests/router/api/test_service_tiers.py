"""Service tiers in the words of each API: what they change, and what the answer says about them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.placement.capacity import Capacity
from kvferry.protocol.labels import TARGET_OUTCOMES
from kvferry.protocol.lease import Rates
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.bodies.fields import TierFields
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, app_of, demo_text, error_of, events, named_events, says
from tests.fake_workers import Bench, decode, expected
from tests.waiting import until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
}
"""A body of each endpoint."""


async def told(api: Api, path: str, **more: Any) -> dict[str, Any]:
    response = await api.http.post(path, json={**ASKED[path], **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("asked", "used"),
    [("auto", "default"), ("default", "default"), ("scale", "default"), ("flex", "flex"), ("priority", "priority")],
)
async def test_an_answer_says_which_of_openai_s_tiers_was_used(path: str, asked: str, used: str) -> None:
    api = Api(FakeCluster(says("x")))
    assert (await told(api, path, service_tier=asked))["service_tier"] == used
    call = api.cluster.dispatches[-1].spec.call
    assert (call.is_background, call.priority) == (used == "flex", {"flex": 1, "priority": -1}.get(used, 0))


async def test_a_request_without_a_tier_is_of_the_default_one() -> None:
    api = Api(FakeCluster(says("x")))
    assert "service_tier" not in await told(api, "/v1/chat/completions")
    assert (await told(api, "/v1/responses"))["service_tier"] == "default"
    assert {dispatch.spec.call.priority for dispatch in api.cluster.dispatches} == {0}


async def test_streams_name_their_tier_too() -> None:
    api = Api(FakeCluster(says("x y")))
    body = {**ASKED["/v1/chat/completions"], "stream": True, "service_tier": "flex"}
    chunks = events(await api.http.post("/v1/chat/completions", json=body))[:-1]
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    body = {**ASKED["/v1/responses"], "stream": True, "service_tier": "priority"}
    responses = [event["response"] for event in named_events(await api.http.post("/v1/responses", json=body))
                 if "response" in event]  # fmt: skip
    assert {response["service_tier"] for response in responses} == {"priority"}
    body = {**ASKED["/v1/messages"], "stream": True, "service_tier": "auto"}
    first, *_ = named_events(await api.http.post("/v1/messages", json=body))
    assert first["message"]["usage"]["service_tier"] == "standard"


@pytest.mark.parametrize("tier", [None, "auto", "standard_only"])
async def test_a_message_says_which_of_anthropic_s_tiers_was_used(tier: str | None) -> None:
    body = await told(Api(FakeCluster(says("x"))), "/v1/messages", service_tier=tier)
    assert body["usage"]["service_tier"] == "standard"


@pytest.mark.parametrize(("path", "tier"), [("/v1/responses", "gold"), ("/v1/messages", "flex")])
async def test_an_unknown_tier_is_refused_by_name(path: str, tier: str) -> None:
    refused = await Api(FakeCluster(says("x"))).http.post(path, json={**ASKED[path], "service_tier": tier})
    assert refused.status_code == 400
    if path == "/v1/responses":
        assert error_of(refused)["param"] == "service_tier"
    assert "service_tier" in refused.json()["error"]["message"]


async def test_tiers_order_one_tenant_s_requests() -> None:
    api = Api(FakeCluster(says("x " * 5), gap_s=0.01))
    api.cluster.takes = Capacity(1)
    tiers = ["default", "flex", "default", "flex", "priority", "default", "priority"]
    tasks = []
    for number, tier in enumerate(tiers):
        tasks.append(asyncio.create_task(api.complete(prompt=[number + 1], service_tier=tier)))
        await asyncio.sleep(0.005)
    assert {(await task).status_code for task in tasks} == {200}
    order = [dispatch.spec.token_ids[0] - 1 for dispatch in api.cluster.dispatches]
    assert order == [0, 1, 2, 4, 6, 5, 3], "what a flexible one uses is open to the others"


def test_what_yields_has_no_priority() -> None:
    asked = TierFields(service_tier="priority")
    assert (asked.tier_used(is_background=True), asked.tier_used(is_background=False)) == ("default", "priority")


async def test_flex_requests_give_way_to_a_tenant_s_target(tmp_path: Path) -> None:
    """From the body's tier and the tenant's file to the node, although the others hold all slots that one may."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f"{entry('a', 'key-a')}\n{entry('b', 'key-b')}itl_ms = 12\n")
    rates = Rates(step_s=0.01, alone_s=0.010, stream_s=0.001)
    async with Bench([decode(changes={"rates": rates, "max_num_seqs": 6})]) as bench:
        app = app_of(bench.cluster, demo_text(), bench.metrics, RouterSettings(api_keys=str(keys)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:

            async def ask(name: str, number: int, most: int, **more: Any) -> dict[str, Any]:
                body = {"prompt": [number, 5, 6], "max_tokens": most, "ignore_eos": True, "return_token_ids": True}
                headers = {"authorization": f"Bearer key-{name}"}
                answer = await http.post("/v1/completions", json={**body, **more}, headers=headers)
                assert answer.status_code == 200, answer.text
                told: dict[str, Any] = answer.json()
                return told

            flexible = [asyncio.create_task(ask("a", number, 150, service_tier="flex")) for number in range(3)]
            await until(lambda: len(bench["d1"]._made) == 3)
            urgent = await ask("b", 900, 20)
            assert bench.retries() == {"displaced": 1}
            assert not any(task.done() for task in flexible)
            answers = [await task for task in flexible]
    assert urgent["choices"][0]["token_ids"] == expected([900, 5, 6], 20)
    for number, answer in enumerate(answers):
        assert answer["service_tier"] == "flex"
        assert answer["choices"][0]["token_ids"] == expected([number, 5, 6], 150)
        assert answer["usage"]["prompt_tokens"] == 3
    outcomes = {outcome: bench.metrics.itl_targets.labels("b", outcome)._value.get() for outcome in TARGET_OUTCOMES}
    assert (outcomes["rejected"], sum(outcomes.values())) == (0, 1)
