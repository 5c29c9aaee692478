"""/v1/messages: whole and streamed, in the words of Anthropic's API, its errors included."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import NodeLost, NoNodes, Overloaded
from kvferry.router.api.bodies.reader import parse
from kvferry.router.api.messages.body import CountBody, MessagesBody
from kvferry.router.api.messages.chat import MessagesChat, chat, messages
from kvferry.router.text.transcript import CallDelta, Piece
from tests.api_parts import Api, FakeCluster, demo_text, ids_of, named_events, outputs_for, says

ANSWER = "Hello there, 42 emoji 👩‍👧 done."
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


async def say(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 100, **body})


def built(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events; checks that blocks come one after another."""
    first, ping, *rest = events
    assert (first["type"], ping) == ("message_start", {"type": "ping"})
    message: dict[str, Any] = dict(first["message"])
    blocks: list[dict[str, Any]] = []
    arguments, is_open = "", False
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                arguments, is_open = "", True
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                match delta["type"]:
                    case "text_delta":
                        blocks[-1]["text"] += delta["text"]
                    case "thinking_delta":
                        blocks[-1]["thinking"] += delta["thinking"]
                    case "signature_delta":
                        blocks[-1]["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
                    case kind:
                        raise AssertionError(kind)
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(arguments or "{}")
            case "message_delta":
                message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
            case kind:
                assert kind == "message_stop"
                assert event is rest[-1]
    assert not is_open
    return {**message, "content": blocks}


def failure(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return dict(body["error"])


async def test_a_whole_message() -> None:
    api = Api(FakeCluster(says(ANSWER), cached=4))
    response = await say(api, system="Be brief", temperature=0.5, top_k=3, metadata={"user_id": "u"})
    prompt = ids_of(demo_text().render([{"role": "system", "content": "Be brief"}, *HELLO]))
    assert response.json() == {
        "id": f"msg_{response.headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "SmolLM2-135M-Instruct",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt) - 4,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "service_tier": "standard",
            "output_tokens": len(ids_of(ANSWER)) + 1,
        },
    }
    params = api.cluster.dispatches[0].spec.params
    assert (params.max_tokens, params.temperature, params.top_k) == (100, 0.5, 3)
    assert api.cluster.dispatches[0].spec.token_ids == tuple(prompt)


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_a_streamed_message_builds_up_the_whole_one(per_output: int) -> None:
    api = Api(FakeCluster(says(ANSWER, per_output=per_output)))
    response = await say(api, stream=True)
    events = named_events(response)
    whole = (await say(api)).json()
    assert built(events) == {**whole, "id": f"msg_{response.headers['x-request-id']}"}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_text_and_calls_are_blocks_in_their_order(parsed: list[Piece], stream: bool) -> None:
    parsed += [
        Piece(reasoning="I think"), Piece(reasoning=", so", text="Let me"), Piece(text=" see."),
        Piece(calls=(CallDelta(0, "call_a", "look", '{"x"'),)), Piece(calls=(CallDelta(0, arguments=":1}"),)),
        Piece(calls=(CallDelta(1, "call_b", "wait"),)), Piece(),
    ]  # fmt: skip
    api = Api(FakeCluster(lambda spec: outputs_for(spec, list(range(300, 306)))))
    response = await say(api, stream=stream)
    message = built(named_events(response)) if stream else response.json()
    assert message["content"] == [
        {"type": "thinking", "thinking": "I think, so", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_b", "name": "wait", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


async def test_an_answer_in_json_that_was_closed_in_time_is_a_turn_that_ended() -> None:
    api = Api(FakeCluster(says('{"a": 1}', finish="closed")))
    message = (await say(api)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_reasons_to_stop() -> None:
    api = Api(FakeCluster(says(ANSWER)))
    cut = (await say(api, max_tokens=2)).json()
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = (await say(api, stop_sequences=["emoji"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "emoji")
    assert stopped["content"][0]["text"] == "Hello there, 42 "


def test_the_conversation_becomes_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": "é"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
            {"type": "text", "text": "and?"},
        ]},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    body = parse(MessagesBody, json.dumps({"messages": turns, "max_tokens": 1, "system": system}).encode())
    function = {"name": "look", "arguments": '{"x": "é"}'}
    assert messages(body) == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm",
         "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "well"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
    ]  # fmt: skip


@pytest.mark.parametrize("rest", ["Be brief.", "Be brief.\nx-anthropic-billing-header: is what a file says"])
def test_claude_code_s_billing_line_is_no_part_of_the_prompt(rest: str) -> None:
    """It changes with each request: no prompt began like the one before it."""
    first = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a1b2c;"}
    for system in ([first, {"type": "text", "text": rest}], f"{first['text']}\n{rest}"):
        body = parse(CountBody, json.dumps({"messages": HELLO, "system": system}).encode())
        assert messages(body)[0] == {"role": "system", "content": rest}
    assert messages(parse(CountBody, json.dumps({"messages": HELLO, "system": [first]}).encode()))[0]["role"] == "user"


def asked(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> MessagesChat:
    """The chat of these fields, whatever of it this server can do."""
    monkeypatch.setattr(MessagesChat, "check", lambda self: None)
    return chat(parse(MessagesBody, json.dumps({"messages": HELLO, "max_tokens": 5, **fields}).encode()))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        (None, None),
    ],
)
def test_tools_and_their_choice(monkeypatch: pytest.MonkeyPatch, choice: Any, expected: Any) -> None:
    found = asked(monkeypatch, tools=[TOOL], tool_choice=choice)
    parameters = TOOL["input_schema"]
    function = {"name": "look", "parameters": parameters, "description": "Looks."}
    assert found.tools == [{"type": "function", "function": function}]
    assert found.tool_choice == expected


@pytest.mark.parametrize(
    ("thinking", "told"),
    [(None, False), ({"type": "enabled", "budget_tokens": 2000}, True), ({"type": "disabled"}, False)],
)
def test_models_think_when_they_are_asked_to(monkeypatch: pytest.MonkeyPatch, thinking: Any, told: bool) -> None:
    found = asked(monkeypatch, thinking=thinking)
    assert found.chat_template_kwargs == {"enable_thinking": told}
    assert found.thinking_token_budget == (2000 if told else None)
    assert found.reasoning_budget(demo_text()) is None  # nothing could end its thoughts, and clients send one to all


async def test_the_assistant_s_last_words_are_continued() -> None:
    api = Api(FakeCluster(says(" world")))
    turns = [*HELLO, {"role": "assistant", "content": "Hello"}]
    assert (await say(api, messages=turns)).status_code == 200
    text = demo_text().render(turns, add_generation_prompt=False, continue_final_message=True)
    assert api.cluster.dispatches[0].spec.token_ids == tuple(ids_of(text))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
         "messages[0].content[0].source.url"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
         "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
         "messages[0].content[0].id"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": "x" * 2000}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"thinking": {"type": "on"}}, "thinking.type: must be enabled, disabled or adaptive"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers: calling MCP servers is not"),
        ({"container": "c"}, "container: running code in containers is not supported by this server"),
    ],
)  # fmt: skip
async def test_what_is_refused_names_its_field(body: dict[str, Any], named: str) -> None:
    response = await say(Api(FakeCluster(says("x"))), **body)
    assert response.status_code == 400
    told = failure(response)
    assert told["type"] == "invalid_request_error"
    assert named in told["message"]


async def test_a_full_context_is_told_in_the_words_that_claude_code_reads() -> None:
    """It asks for fewer tokens, or shortens the conversation, when it finds these words and numbers."""
    api = Api(FakeCluster(says("x"), max_model_len=300))
    for body, words in (
        ({"max_tokens": 1000}, r"input length and `max_tokens` exceed context limit: (\d+) \+ 1000 > 300"),
        ({"messages": [{"role": "user", "content": "a " * 400}]}, r"prompt is too long: (\d+) tokens > 300"),
        ({"messages": [{"role": "user", "content": "a " * 90_000}]}, "prompt is too long: .* 300 tokens"),
    ):
        told = failure(await say(api, **body))
        assert told["type"] == "invalid_request_error"
        assert re.match(words, told["message"]), told["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(Overloaded("full"), 429, "rate_limit_error"), (NoNodes("none"), 503, "overloaded_error")],
)
async def test_errors_before_the_first_token_have_their_status(error: Any, status: int, kind: str) -> None:
    api = Api(FakeCluster(says("x")))
    api.cluster.refusal = error
    response = await say(api, stream=True)
    assert (response.status_code, failure(response)["type"]) == (status, kind)
    assert int(response.headers["retry-after"]) >= 1


async def test_an_error_in_the_stream_is_an_event() -> None:
    api = Api(FakeCluster(lambda spec: [*outputs_for(spec, ids_of("a b c"))[:2], NodeLost("it went")]))
    *_, last = named_events(await say(api, stream=True))
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "it went"}}


async def test_what_the_framework_refuses_is_told_in_the_same_words() -> None:
    api = Api(FakeCluster(says("x")))
    for response, status, kind in (
        (await api.http.get("/v1/messages"), 405, "invalid_request_error"),
        (await api.http.post("/v1/messages/batches"), 404, "not_found_error"),
        (await api.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (await say(api, model="other"), 404, "not_found_error"),
    ):
        assert (response.status_code, failure(response)["type"]) == (status, kind)
    assert (await api.http.get("/v1/messagesx")).json()["error"]["code"] == "not_found"


async def test_the_key_may_come_as_x_api_key() -> None:
    api = Api(FakeCluster(says("x")), api_key="k")
    refused = await say(api)
    assert (refused.status_code, failure(refused)["type"]) == (401, "authentication_error")
    for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
    for headers in ({"x-api-key": "no"}, {"authorization": "Bearer no", "x-api-key": "k"}, {"x-api-key": ""}):
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 401


async def test_tokens_are_counted() -> None:
    api = Api(FakeCluster(says("x")))
    body = {"messages": HELLO, "system": "Be brief", "model": "SmolLM2-135M-Instruct"}
    response = await api.http.post("/v1/messages/count_tokens", json=body)
    prompt = demo_text().render([{"role": "system", "content": "Be brief"}, *HELLO])
    assert response.json() == {"input_tokens": len(ids_of(prompt))}
    refused = await api.http.post("/v1/messages/count_tokens", json={"messages": []})
    assert (refused.status_code, failure(refused)["type"]) == (400, "invalid_request_error")
