"""Responses in the background: taken at once, fetched later, cancelled, deleted; and bounded like all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from openai.types.responses import Response

from kvferry.protocol.errors import NodeLost
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, error_of, ids_of, outputs_for, says
from tests.waiting import until

ANSWER = "one two three four"


async def begin(api: Api, **body: Any) -> dict[str, Any]:
    response = await api.http.post("/v1/responses", json={"input": "Hello", "background": True, **body})
    assert response.status_code == 200, response.text
    begun: dict[str, Any] = response.json()
    Response.model_validate(begun)
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    return begun


async def fetched(api: Api, begun: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = (await api.http.get(f"/v1/responses/{begun['id']}")).json()
    return body


async def ended(api: Api, begun: dict[str, Any]) -> dict[str, Any]:
    for _ in range(500):
        body = await fetched(api, begun)
        if body["status"] != "in_progress":
            return body
        await asyncio.sleep(0.01)
    raise AssertionError("it does not end")


async def test_a_response_is_generated_behind_the_client_s_back() -> None:
    api = Api(FakeCluster(says(ANSWER), gap_s=0.02))
    begun = await begin(api)
    assert (await fetched(api, begun))["status"] == "in_progress"
    body = await ended(api, begun)
    Response.model_validate(body)
    assert body["status"] == "completed"
    assert body["output"][0]["content"][0]["text"] == ANSWER
    assert api.cluster.dispatches[0].heard, "its tokens wake nobody"
    assert body["created_at"] == begun["created_at"]
    response = await api.http.post("/v1/responses", json={"input": "go on", "previous_response_id": begun["id"]})
    assert response.status_code == 200


async def test_one_that_is_in_progress_is_not_continued() -> None:
    api = Api(FakeCluster(says(ANSWER), gap_s=1))
    begun = await begin(api)
    refused = await api.http.post("/v1/responses", json={"input": "go on", "previous_response_id": begun["id"]})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "previous_response_id")
    await api.http.delete(f"/v1/responses/{begun['id']}")


async def test_it_is_cancelled_with_what_it_has() -> None:
    api = Api(FakeCluster(says(ANSWER * 50), gap_s=0.01))
    begun = await begin(api)
    (dispatch,) = api.cluster.dispatches
    await until(lambda: dispatch.yielded > 2)
    body = (await api.http.post(f"/v1/responses/{begun['id']}/cancel")).json()
    Response.model_validate(body)
    assert body["status"] == "cancelled"
    assert body["output"][0]["status"] == "incomplete"
    assert dispatch.cancelled.is_set()
    assert await fetched(api, begun) == body
    assert (await api.http.post(f"/v1/responses/{begun['id']}/cancel")).json() == body


async def test_what_is_deleted_ends_and_does_not_come_back() -> None:
    api = Api(FakeCluster(says(ANSWER), gap_s=0.05))
    begun = await begin(api)
    assert (await api.http.delete(f"/v1/responses/{begun['id']}")).status_code == 200
    assert api.cluster.dispatches[0].cancelled.is_set()
    await asyncio.sleep(0.1)
    assert (await api.http.get(f"/v1/responses/{begun['id']}")).status_code == 404


async def test_one_that_fails_says_why() -> None:
    api = Api(FakeCluster(lambda spec: [*outputs_for(spec, ids_of("a b c"))[:2], NodeLost("it went")]))
    body = await ended(api, await begin(api))
    Response.model_validate(body)
    assert (body["status"], body["error"]) == ("failed", {"code": "server_error", "message": "it went"})


async def test_only_background_responses_can_be_cancelled() -> None:
    api = Api(FakeCluster(says("x")))
    body = (await api.http.post("/v1/responses", json={"input": "x"})).json()
    assert (await api.http.post(f"/v1/responses/{body['id']}/cancel")).status_code == 400
    assert (await api.http.post("/v1/responses/resp_none/cancel")).status_code == 404


async def test_it_takes_a_place_and_gives_it_back() -> None:
    api = Api(FakeCluster(says(ANSWER), gap_s=0.05), max_inflight=2)
    begun = await begin(api)
    second = await begin(api)
    refused = await api.http.post("/v1/responses", json={"input": "x"})
    assert refused.status_code == 429
    await api.http.post(f"/v1/responses/{begun['id']}/cancel")
    assert (await api.http.post("/v1/responses", json={"input": "x"})).status_code == 200
    await ended(api, second)


async def test_what_could_not_be_fetched_is_refused() -> None:
    api = Api(FakeCluster(says("x")))
    for body, param in (({"stream": True}, "background"), ({"store": False}, "background")):
        refused = await api.http.post("/v1/responses", json={"input": "x", "background": True, **body})
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    api.kept.available = False
    refused = await api.http.post("/v1/responses", json={"input": "x", "background": True})
    assert (refused.status_code, error_of(refused)["param"]) == (503, "background")
    assert api.cluster.dispatches == []


async def test_its_tenant_s_limits_hold_and_nobody_else_reaches_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry('a', 'key-a')}concurrent = 1\n{entry('b', 'key-b')}\n")
    api = Api(FakeCluster(says(ANSWER), gap_s=0.2), api_keys=str(file))
    api.http.headers["authorization"] = "Bearer key-a"
    begun = await begin(api)
    refused = await api.http.post("/v1/responses", json={"input": "x", "background": True})
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    place, other = f"/v1/responses/{begun['id']}", {"x-api-key": "key-b"}
    del api.http.headers["authorization"]
    for method, path in (
        ("GET", place),
        ("DELETE", place),
        ("POST", f"{place}/cancel"),
        ("GET", f"{place}/input_items"),
    ):
        assert (await api.http.request(method, path, headers=other)).status_code == 404
    continued = {"input": "x", "previous_response_id": begun["id"]}
    assert (await api.http.post("/v1/responses", json=continued, headers=other)).status_code == 404
    own = {"x-api-key": "key-a"}
    assert (await api.http.post(f"{place}/cancel", headers=own)).json()["status"] == "cancelled"
    assert (await api.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}, headers=own)).is_success
    assert api.sample("kvferry_tenant_tokens_total", tenant="a", kind="prompt") > 0
