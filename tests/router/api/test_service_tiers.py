"""Service tiers in the words of each API: what they change, and what the answer says about them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.placement.capacity import Capacity
from kvferry.router.api.bodies.fields import TierFields
from tests.api_parts import Api, FakeCluster, error_of, events, named_events, says

ASKED = {
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
    assert (call.is_patient, call.priority) == (used == "flex", {"flex": 1, "priority": -1}.get(used, 0))


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
    assert order[2:] == [4, 6, 2, 5, 3]


def test_what_yields_has_no_priority() -> None:
    asked = TierFields(service_tier="priority")
    assert (asked.tier_used(is_patient=True), asked.tier_used(is_patient=False)) == ("default", "priority")
