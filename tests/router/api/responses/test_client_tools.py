"""Tools of the Responses API beside plain functions: namespaces and custom tools in requests, answers and histories."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.responses.tools import client_tools, input_of, relocated
from tests.api_parts import Api, FakeCluster, demo_text, error_of, named_events, says

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TEAM = {"type": "namespace", "name": "team", "description": "others", "tools": [{**LOOK, "name": "wait"}, LOOK]}
PATCH = {"type": "custom", "name": "patch", "description": "Edit files.", "format": {"type": "text"}}
TOOLS: list[dict[str, Any]] = [LOOK, TEAM, PATCH]


def call_of(name: str, arguments: dict[str, Any]) -> str:
    """What the demo model says to call a function."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def respond(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/responses", json={"input": "Hello", "tools": TOOLS, **body})


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


async def called(name: str, arguments: dict[str, Any], **body: Any) -> dict[str, Any]:
    """The only item of the answer in which the model calls this function; streamed and whole it is the same."""
    api = Api(FakeCluster(says(call_of(name, arguments))))
    response = await respond(api, **body)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    (item,) = response.json()["output"]
    streamed = named_events(await respond(api, **body, stream=True))
    for event in streamed:
        EVENT.validate_python(event)
    (last,) = streamed[-1]["response"]["output"]
    assert {**last, "id": 0, "call_id": 0} == {**item, "id": 0, "call_id": 0}
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == [last]
    assert isinstance(item, dict)
    return item


async def test_a_tool_of_a_namespace_is_called_by_both_names() -> None:
    item = await called("team__wait", {"x": 1})
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "team", "wait")
    assert json.loads(item["arguments"]) == {"x": 1}
    plain = await called("look", {"x": 2})
    assert (plain["name"], "namespace" in plain) == ("look", False)
    assert (await called("team__look", {"x": 2}))["namespace"] == "team"


async def test_a_custom_tool_is_called_with_its_text() -> None:
    text = '*** Begin\n+"quoted" \\ é\n'
    item = await called("patch", {"input": text})
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert item["id"].startswith("ctc_")


async def test_a_custom_tool_s_input_comes_in_events_of_its_own() -> None:
    api = Api(FakeCluster(says("Look: " + call_of("patch", {"input": "a\nb"}))))
    events = named_events(await respond(api, stream=True))
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert "".join(event["delta"] for event in told[:-1]) == told[-1]["input"] == "a\nb"
    (added,) = [event["item"] for event in events if event["type"] == "response.output_item.added"][1:]
    assert (added["type"], added["input"], added["status"]) == ("custom_tool_call", "", "in_progress")
    assert not any("function_call_arguments" in event["type"] for event in events)


async def test_calls_and_results_go_back_to_the_model_as_it_made_them() -> None:
    api = Api(FakeCluster(says("done")))
    items = [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": "a", "namespace": "team", "name": "wait", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "waited"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'say "é"'},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "patched"}]},
    ]
    assert (await respond(api, input=items)).status_code == 200
    prompt = prompt_of(api)
    assert '"team__wait", "arguments": {"x": 1}' in prompt
    assert json.dumps({"input": 'say "é"'}, ensure_ascii=False) in prompt
    assert prompt.index("waited") < prompt.index("patched")


async def test_a_stored_call_of_a_custom_tool_is_continued_by_its_response_and_by_reference() -> None:
    api = Api(FakeCluster(says(call_of("patch", {"input": "first edit"}))))
    first = (await respond(api)).json()
    output = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "patched"}
    assert (await respond(api, previous_response_id=first["id"], input=[output])).status_code == 200
    assert "first edit" in prompt_of(api)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert (await respond(api, input=[reference, output])).status_code == 200
    assert "first edit" in prompt_of(api)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "namespace": "team", "name": "wait"}, "team__wait"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}, "patch"),
    ],
)
async def test_they_are_chosen_as_functions_are(choice: dict[str, Any], name: str) -> None:
    api = Api(FakeCluster(says(call_of(name, {"input": "x"}))))
    assert (await respond(api, tool_choice=choice)).status_code == 200
    grammar = api.cluster.grammar
    assert grammar is not None
    assert name in grammar.source
    assert '"look' not in grammar.source


def test_the_format_of_an_input_becomes_a_pattern_or_is_described() -> None:
    def function(**format: str) -> dict[str, Any]:
        (tool,) = client_tools([{**PATCH, "format": {"type": "grammar", **format}}])
        return tool.function

    pattern = function(syntax="regex", definition="a+|b")
    assert pattern["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:a+|b)$"}
    told = function(syntax="lark", definition='start: "a"')
    assert told["description"].startswith("Edit files.\n")
    assert told["description"].endswith('start: "a"')


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search", "external_web_access": False}], "tools[0].type"),
        ([LOOK, {"type": "namespace", "tools": []}], "tools[1].name"),
        ([LOOK, {"type": "namespace", "name": "a"}], "tools[1].tools"),
        ([{"type": "namespace", "name": "a", "tools": [LOOK, {"type": "mcp"}]}], "tools[0].tools[1].type"),
        ([{"type": "namespace", "name": "a" * 64, "tools": [LOOK]}], "tools[0].tools[0].name"),
        ([TEAM, {**LOOK, "name": "team__wait"}], "tools[1].name"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}], "tools[0].format"),
        ([TEAM, {**LOOK, "name": "a b"}], "tools[1].name"),
        ([TEAM, {**LOOK, "parameters": "x"}], "tools[1].parameters"),
    ],
)
async def test_what_is_refused_names_its_place_in_the_request(tools: list[Any], param: str) -> None:
    response = await respond(Api(FakeCluster(says("x"))), tools=tools)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert param in error["message"]


def test_a_hosted_tool_s_refusal_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="leave it out"):
        client_tools([{"type": "web_search_preview"}])


def test_a_call_that_was_cut_shows_what_it_has() -> None:
    assert input_of('{"input": "a') == '{"input": "a'
    assert input_of("[1]") == "[1]"


def test_an_error_elsewhere_stays_as_it_is() -> None:
    error = InvalidRequest("temperature is wrong", param="temperature")
    assert relocated(error, client_tools(TOOLS)) is error
