"""Responses that are kept: continued, fetched, listed, deleted; of each tenant alone; and a store that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from openai.types.responses import ResponseItemList

from kvferry.protocol.errors import NotFound
from kvferry.router.api.responses.stored_responses import StoredResponse, StoredResponses
from kvferry.router.api.served_models import ServedModel
from tests.api_parts import Api, FakeCluster, demo_text, error_of, says
from tests.memory_responses import MemoryResponses


async def respond(api: Api, **body: Any) -> dict[str, Any]:
    response = await api.http.post("/v1/responses", json={"input": "Hello", **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


async def test_a_response_continues_another_with_all_before_it() -> None:
    api = Api(FakeCluster(says("fine")))
    first = await respond(api, input="one", instructions="Only once.")
    second = await respond(api, input="two", previous_response_id=first["id"])
    third = await respond(api, input="three", previous_response_id=second["id"], instructions="Be kind.")
    chat = [{"role": "system", "content": "Be kind."}]
    for said in ("one", "two"):
        chat += [{"role": "user", "content": said}, {"role": "assistant", "content": "fine"}]
    assert prompt_of(api) == demo_text().render([*chat, {"role": "user", "content": "three"}])
    assert third["previous_response_id"] == second["id"]
    assert (await api.http.delete(f"/v1/responses/{first['id']}")).status_code == 200
    await respond(api, input="four", previous_response_id=third["id"])
    assert "one" in prompt_of(api)


async def test_a_list_of_mcp_tools_is_kept_as_given_and_no_part_of_the_chat() -> None:
    """Histories of other servers hold such items; the model gets its tools from `tools`."""
    api = Api(FakeCluster(says("x")))
    tools = [{"name": "roll", "input_schema": {"type": "object"}, "annotations": None, "description": "Dice."}]
    listed = {"id": "mcpl_1", "type": "mcp_list_tools", "server_label": "dice", "tools": tools}
    body = await respond(api, input=[listed, {"role": "user", "content": "Hi"}])
    assert prompt_of(api) == demo_text().render([{"role": "user", "content": "Hi"}])
    items = (await api.http.get(f"/v1/responses/{body['id']}/input_items?order=asc")).json()
    assert ResponseItemList.model_validate(items).data[0].type == "mcp_list_tools"
    assert items["data"][0] == listed
    for fault, param in (({"tools": "x"}, "input[0].tools"), ({"server_label": 1}, "input[0].server_label")):
        refused = await api.http.post("/v1/responses", json={"input": [{**listed, **fault}]})
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_what_is_not_stored_is_not_kept() -> None:
    api = Api(FakeCluster(says("x")))
    body = await respond(api, store=False)
    assert body["store"] is False
    response = await api.http.get(f"/v1/responses/{body['id']}")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    again = await api.http.post("/v1/responses", json={"input": "x", "previous_response_id": body["id"]})
    assert (again.status_code, error_of(again)["param"]) == (404, "previous_response_id")


async def test_a_response_is_fetched_and_deleted() -> None:
    api = Api(FakeCluster(says("x")))
    body = await respond(api)
    place = f"/v1/responses/{body['id']}"
    assert (await api.http.get(place)).json() == body
    assert (await api.http.delete(place)).json() == {"id": body["id"], "object": "response", "deleted": True}
    assert (await api.http.delete(place)).status_code == 404
    assert (await api.http.get(place)).status_code == 404
    assert (await api.http.get("/v1/responses/..%2fx")).status_code == 404
    unrecorded = await api.http.get(place + "?stream=true")
    assert (unrecorded.status_code, error_of(unrecorded)["code"]) == (404, "not_found")


async def test_input_items_are_listed_in_pages() -> None:
    api = Api(FakeCluster(says("x")))
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "type": "message", "id": "msg_own"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    body = await respond(api, input=items)
    place = f"/v1/responses/{body['id']}/input_items"
    whole = (await api.http.get(place, params={"order": "asc"})).json()
    ResponseItemList.model_validate(whole)
    assert [item["type"] for item in whole["data"]] == [
        "message", "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert whole["data"][1]["id"] == "msg_own"
    assert whole["has_more"] is False
    seen, after = [], {}
    while True:
        page = (await api.http.get(place, params={"limit": 2, **after})).json()
        seen += page["data"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == whole["data"][::-1]
    for query in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"limit": "x"}, {"after": "none"}):
        refused = await api.http.get(place, params=query)
        assert (refused.status_code, error_of(refused)["param"]) == (400, next(iter(query)))


async def test_an_item_may_be_named_instead_of_sent() -> None:
    api = Api(FakeCluster(says("fine")))
    body = await respond(api, input="one")
    reference = {"type": "item_reference", "id": body["output"][0]["id"]}
    await respond(api, input=[{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}])
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "fine"}]
    assert prompt_of(api) == demo_text().render([*chat, {"role": "user", "content": "two"}])
    (asked,) = (await api.http.get(f"/v1/responses/{body['id']}/input_items")).json()["data"]
    await respond(api, input=[{"type": "item_reference", "id": asked["id"]}])
    assert prompt_of(api) == demo_text().render(chat[:1])
    stem = reference["id"][:-1]
    for missing in (stem + "7", stem + "9" * 5000, stem.replace("msg", "fc") + "0", stem.replace("msg", "in") + "1"):
        refused = await api.http.post("/v1/responses", json={"input": [{"type": "item_reference", "id": missing}]})
        assert (refused.status_code, error_of(refused)["param"]) == (404, "input[0].id")


async def test_a_store_that_fails_fails_no_response(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(FakeCluster(says("fine")))
    kept = await respond(api)
    api.kept.available = False
    with caplog.at_level(logging.WARNING, "kvferry.responses"):
        body = await respond(api)
        streamed = await api.http.post("/v1/responses", json={"input": "x", "stream": True})
    assert body["status"] == "completed"
    assert "event: response.completed" in streamed.text
    first, second = (record.message for record in caplog.records)
    assert first.startswith(f"{body['id']} is not stored")
    assert "is not stored" in second
    refused = await api.http.post("/v1/responses", json={"input": "x", "previous_response_id": kept["id"]})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "registry_unavailable")
    assert error_of(refused)["param"] == "previous_response_id"
    assert (await api.http.get(f"/v1/responses/{kept['id']}")).status_code == 503


async def test_a_record_that_is_too_large_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    responses = StoredResponses(MemoryResponses(share=10))
    with caplog.at_level(logging.WARNING, "kvferry.responses"):
        await responses.put("", StoredResponse({"id": "resp_a"}, [], []))
    assert "resp_a is not stored" in caplog.text


async def test_nobody_reads_anothers_responses() -> None:
    responses = StoredResponses(MemoryResponses())
    await responses.put("ann", StoredResponse({"id": "resp_a", "output": []}, [], []))
    assert (await responses.get("ann", "resp_a")).response["id"] == "resp_a"
    with pytest.raises(NotFound):
        await responses.get("bob", "resp_a")
    with pytest.raises(NotFound):
        await responses.delete("bob", "resp_a")
    await responses.delete("ann", "resp_a")


async def test_without_a_store_nothing_is_kept_and_the_refusal_says_so() -> None:
    with pytest.raises(NotFound, match="this server stores no responses"):
        await StoredResponses(None).get("", "resp_a")


async def test_a_short_request_cannot_ask_for_a_long_item_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(FakeCluster(says("fine")))
    first = await respond(api, input="one " * 100)
    (asked,) = (await api.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    reference = {"type": "item_reference", "id": asked["id"]}
    twice = await api.http.post(
        "/v1/responses", json={"input": [reference, {"role": "user", "content": "x"}, reference]}
    )
    assert (twice.status_code, error_of(twice)["param"]) == (400, "input[2].id")
    monkeypatch.setattr("kvferry.router.api.responses.stored_responses.MAX_RECORD_BYTES", 100)
    long = await api.http.post("/v1/responses", json={"input": [reference]})
    assert (long.status_code, error_of(long)["param"]) == (400, "input[0]")
    assert "100 bytes" in error_of(long)["message"]


async def test_what_is_only_named_counts_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are encoded beside the event loop."""
    api, sizes = Api(FakeCluster(says("fine"))), []
    specs = ServedModel.specs
    monkeypatch.setattr(
        ServedModel, "specs", lambda pool, call, body, size: sizes.append(size) or specs(pool, call, body, size)
    )
    first = await respond(api, input="one " * 2000)
    (asked,) = (await api.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    await respond(api, input=[{"type": "item_reference", "id": asked["id"]}])
    assert sizes[1] > 8000
