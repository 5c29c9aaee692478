"""/v1/responses: whole and streamed, held to the official client's own models of bodies and events."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvferry.protocol.errors import InvalidRequest, NodeLost, Overloaded
from kvferry.router.api.bodies.translated import renamed, translated
from kvferry.router.api.responses.request import ResponsesChat
from kvferry.router.text.transcript import CallDelta, Piece
from tests.api_parts import Api, FakeCluster, demo_text, error_of, ids_of, named_events, outputs_for, says

ANSWER = "Hello there, 42 emoji 👩‍👧 done."
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def respond(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/responses", json={"input": "Hello", **body})


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """A response that the client's model reads without a field of its own left over or missing."""
    TypeAdapter(Response).validate_python(body, strict=False)
    return body


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """Events of the client's model, numbered from 0."""
    found = named_events(response)
    for event in found:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types without `response.`; repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


async def test_a_whole_response() -> None:
    api = Api(FakeCluster(says(ANSWER), cached=20))
    response = await respond(api, model="SmolLM2-135M-Instruct", temperature=0.5, metadata={"a": "b"}, user="me")
    body = checked(response.json())
    assert response.status_code == 200
    (item,) = body["output"]
    assert item["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    assert (item["role"], item["status"], body["status"]) == ("assistant", "completed", "completed")
    prompt = ids_of(demo_text().render([{"role": "user", "content": "Hello"}]))
    assert body["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
        "output_tokens": len(ids_of(ANSWER)) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(ids_of(ANSWER)) + 1,
    }
    assert (body["temperature"], body["metadata"], body["user"], body["store"]) == (0.5, {"a": "b"}, "me", True)
    assert response.headers["x-request-id"] in body["id"]
    assert response.headers["x-kvferry-route"].startswith("prefill=p0 decode=d0 reused=20")
    assert tuple(prompt) == api.cluster.dispatches[0].spec.token_ids


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_a_streamed_response_builds_up_the_whole_one(per_output: int) -> None:
    api = Api(FakeCluster(says(ANSWER, per_output=per_output)))
    events = streamed(await respond(api, stream=True))
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == ANSWER
    last = events[-1]["response"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-2]["item"] == last["output"][0]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}
    kept = checked((await api.http.get(f"/v1/responses/{last['id']}")).json())
    assert kept == last


async def test_a_response_without_text_has_an_empty_one() -> None:
    (item,) = checked((await respond(Api(FakeCluster(says(""))))).json())["output"]
    assert item["content"][0]["text"] == ""
    events = streamed(await respond(Api(FakeCluster(says(""))), stream=True))
    assert kinds(events)[2:5] == ["output_item.added", "content_part.added", "output_text.done"]


async def test_reasoning_text_and_calls_are_items_in_their_order(parsed: list[Piece]) -> None:
    script = [
        Piece(reasoning="I think"), Piece(reasoning=", so", text="Let me"), Piece(text=" see."),
        Piece(calls=(CallDelta(0, "call_a", "look", '{"x"'),)), Piece(calls=(CallDelta(0, arguments=":1}"),)),
        Piece(calls=(CallDelta(1, "call_b", "wait"),)), Piece(),
    ]  # fmt: skip
    cluster = FakeCluster(lambda spec: outputs_for(spec, list(range(300, 306))))
    parsed += script
    events = streamed(await respond(Api(cluster), stream=True))
    assert kinds(events)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    parsed += script
    body = checked((await respond(Api(cluster))).json())
    reasoning, message, first, second = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think, so"}]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "look", '{"x":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_b", "wait", "")
    assert [item["type"] for item in events[-1]["response"]["output"]] == [item["type"] for item in body["output"]]
    assert len({item["id"] for item in body["output"]}) == 4


async def test_a_response_cut_by_its_bound_is_incomplete() -> None:
    api = Api(FakeCluster(says(ANSWER)))
    body = checked((await respond(api, max_output_tokens=2)).json())
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    events = streamed(await respond(api, max_output_tokens=2, stream=True))
    assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"


async def test_log_probabilities() -> None:
    api = Api(FakeCluster(says("one two")))
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = checked((await respond(api, **asked)).json())["output"]
    shown = item["content"][0]["logprobs"]
    assert "".join(token["token"] for token in shown).startswith("one two")
    assert [len(token["top_logprobs"]) for token in shown] == [2] * len(shown)
    events = streamed(await respond(api, **asked, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta["logprobs"]] == shown[: len(deltas)]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [token["token"] for token in done["logprobs"]][:2] == [token["token"] for token in shown][:2]


async def test_an_error_in_the_stream_ends_it_by_name() -> None:
    api = Api(FakeCluster(lambda spec: [*outputs_for(spec, ids_of("a b c"))[:2], NodeLost("it went")]))
    events = streamed(await respond(api, stream=True))
    assert kinds(events)[-2:] == ["error", "failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("node_lost", "it went")
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "it went"})
    assert (await api.http.get(f"/v1/responses/{response['id']}")).status_code == 404


async def test_an_error_before_the_first_token_has_its_status() -> None:
    api = Api(FakeCluster(says("x")))
    api.cluster.refusal = Overloaded("full")
    response = await respond(api, stream=True)
    assert (response.status_code, error_of(response)["code"]) == (429, "overloaded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "max"}]}]},
            "input[0].content[0].detail",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].input_audio"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
            "input[0].content[0].input_audio.format",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"format": "wav"}}]}]},
            "input[0].content[0].input_audio.data",
        ),
        ({"input": [{"role": "system", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"temperature": 9}, "temperature"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_what_is_refused_names_its_field(body: dict[str, Any], param: str) -> None:
    response = await respond(Api(FakeCluster(says("x"))), **body)
    assert response.status_code in (400, 404), response.text
    assert error_of(response)["param"] == param


async def test_a_format_that_is_none_is_refused_under_its_own_name() -> None:
    response = await respond(Api(FakeCluster(says("x"))), text={"format": {"type": "grammar"}})
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"].startswith("text.format")
    assert error["message"].startswith("text.format")


def test_a_grammar_is_asked_for_under_the_request_s_own_name() -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
    asked = translated(ResponsesChat, fields, None).grammar(demo_text(), [])
    assert asked is not None
    assert (asked[0], asked[1].kind) == ("text.format", "json_object")


def test_errors_of_the_chat_s_fields_name_the_request_s() -> None:
    names = ResponsesChat.names
    for chat, own in (
        ("tools[0].function.name", "tools[0].name"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages[3].content", "input"),
        ("top_p", "top_p"),
    ):
        error = renamed(InvalidRequest(f"{chat} is wrong", param=chat), names)
        assert (error.param, error.message) == (own, f"{own} is wrong")


async def test_input_items_become_the_messages_of_a_chat() -> None:
    api = Api(FakeCluster(says("x")))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
        {"role": "user", "content": "four"},
    ]
    assert (await respond(api, input=items, instructions="Be brief")).status_code == 200
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert prompt_of(api) == demo_text().render(chat)


async def test_an_overlong_conversation_loses_its_oldest_turns_if_asked() -> None:
    turns = [{"role": "developer", "content": "Rules."}]
    for number in range(12):
        turns += [{"role": "user", "content": f"q{number} " * 20}, {"role": "assistant", "content": "yes"}]
    turns.append({"role": "user", "content": "last"})
    api = Api(FakeCluster(says("x"), max_model_len=300))
    refused = error_of(await respond(api, input=turns, max_output_tokens=20))
    assert refused["code"] == "context_length_exceeded"
    assert (await respond(api, input=turns, max_output_tokens=20, truncation="auto")).status_code == 200
    prompt = prompt_of(api)
    assert "Rules." in prompt
    assert "last" in prompt
    assert "q11" in prompt
    assert "q0" not in prompt
    assert 200 < len(api.cluster.dispatches[-1].spec.token_ids) <= 280
