"""What Codex sends is understood, and what it reads is in the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api_parts import Api, FakeCluster, demo_text, error_of, named_events, says
from tests.router.api.agents.codex_requests import HEADERS, TOOLS, request, returned, said

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def calling(name: str, **arguments: Any) -> Api:
    """A router whose model calls this function."""
    told = json.dumps({"name": name, "arguments": arguments})
    return Api(FakeCluster(says(f"I look.\n<tool_call>\n{told}\n</tool_call>"), max_model_len=8192, cached=16))


async def sent(api: Api, body: dict[str, Any]) -> httpx.Response:
    return await api.http.post("/v1/responses", json=body, headers=HEADERS)


async def turn(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """The response at the end of a turn; Codex takes the items from their own events."""
    answer = await sent(api, body)
    assert answer.status_code == 200, answer.text
    events = named_events(answer)
    for event in events:
        EVENT.validate_python(event)
    last = events[-1]
    assert last["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    response: dict[str, Any] = last["response"]
    return response


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


async def test_a_turn_in_which_a_command_is_called() -> None:
    api = calling("exec_command", cmd="ls")
    response = await turn(api, request())
    message, call = response["output"]
    assert message["content"][0]["text"] == "I look.\n"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "ls"},
    )
    assert response["store"] is False
    usage = response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 16
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    prompt = prompt_of(api)
    for told in ("You are a coding agent.", "<skills_instructions>", "<cwd>/work</cwd>", "multi_agent_v1__wait_agent"):
        assert told in prompt


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("exec_command", {"cmd": "ls"}, {"type": "function_call", "name": "exec_command"}),
        ("apply_patch", {"input": "*** Begin Patch\n"}, {"type": "custom_tool_call", "input": "*** Begin Patch\n"}),
        ("multi_agent_v1__close_agent", {"target": "a"}, {"namespace": "multi_agent_v1", "name": "close_agent"}),
    ],
)
async def test_each_next_prompt_begins_with_the_last_one(name: str, arguments: Any, item: dict[str, Any]) -> None:
    """All that was computed is found again: the calls go back in the words in which they came."""
    api = calling(name, **arguments)
    response = await turn(api, request())
    message, call = response["output"]
    assert item.items() <= call.items()
    await turn(api, request(message, *returned(call, "Exit code: 0\nOutput:\nfine")))
    first, second = (dispatch.spec.token_ids for dispatch in api.cluster.dispatches)
    assert second[: len(first)] == first
    assert "Output:\nfine" in prompt_of(api)


async def test_the_session_goes_on_with_a_further_question() -> None:
    api = calling("exec_command", cmd="ls")
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None}
    body = request(thought, said("assistant", "Done.", 4), said("user", "And now?", 5))
    await turn(api, body)
    assert prompt_of(api).index("Done.") < prompt_of(api).index("And now?")


async def test_metadata_of_a_model_adds_fields() -> None:
    """Those of a model with reasoning, and `fast` and `verbosity` as a user may set them."""
    fields: dict[str, Any] = {
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "service_tier": "priority",
    }
    response = await turn(calling("exec_command", cmd="ls"), request(**fields))
    assert response["reasoning"] == fields["reasoning"]
    assert response["text"]["verbosity"] == "low"


async def test_an_answer_by_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    api = Api(FakeCluster(says('{"a": 1}'), max_model_len=8192))
    format = {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": schema}
    response = await turn(api, request(tools=[], text={"format": format}))
    assert response["output"][0]["content"][0]["text"] == '{"a": 1}'


async def test_a_web_search_is_refused_and_the_refusal_says_what_to_do() -> None:
    search = {"type": "web_search", "external_web_access": False}
    answer = await sent(calling("exec_command"), request(tools=[*TOOLS, search]))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tools[4].type"
    assert "leave it out" in error_of(answer)["message"]


async def test_a_full_context_has_the_code_that_clients_know() -> None:
    api = Api(FakeCluster(says("x"), max_model_len=300))
    assert error_of(await sent(api, request()))["code"] == "context_length_exceeded"
