"""What Claude Code sends is understood, and what it reads is in the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api_parts import Api, FakeCluster, demo_text, named_events, says
from tests.router.api.agents.claude_code_requests import (
    HEADERS,
    PATH,
    opening,
    request,
    returned,
    system,
    title_request,
)

CALLS = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'


def saying(text: str, **more: Any) -> Api:
    return Api(FakeCluster(says(text), max_model_len=8192, cached=16), **more)


async def sent(api: Api, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    return await api.http.post(path, json=body, headers=HEADERS)


async def turn(api: Api, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Content and last delta of a message, built from its events as the client does."""
    answer = await sent(api, body)
    assert answer.status_code == 200, answer.text
    content: list[dict[str, Any]] = []
    delta: dict[str, Any] = {}
    for event in named_events(answer):
        match event["type"]:
            case "content_block_start":
                content.append({**event["content_block"], "json": ""})
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                content[-1]["json"] += event["delta"]["partial_json"]
            case "content_block_delta":
                content[-1]["text"] += event["delta"]["text"]
            case "message_delta":
                delta = event
    for block in content:
        if (text := block.pop("json")) or block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return content, delta


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


async def test_a_turn_in_which_a_command_is_called() -> None:
    api = saying(f"I look.\n{CALLS}")
    content, delta = await turn(api, request())
    assert content[0] == {"type": "text", "text": "I look.\n"}
    assert (content[1]["name"], content[1]["input"]) == ("Bash", {"command": "ls"})
    assert delta["delta"]["stop_reason"] == "tool_use"
    assert delta["usage"]["cache_read_input_tokens"] == 16
    prompt = prompt_of(api)
    for told in (
        "You are an agent.\n\nYou help with software.",
        "<system-reminder>",
        "Available agents",
        '"TaskUpdate"',
    ):
        assert told in prompt
    assert "x-anthropic-billing-header" not in prompt


async def test_each_next_prompt_begins_with_the_last_one() -> None:
    """All that was computed is found again, though the billing line has changed and the cache's mark has moved."""
    api = saying(f"I look.\n{CALLS}")
    content, _ = await turn(api, request())
    history = returned(content, "a file")
    content, _ = await turn(api, request(*history, nonce="24c2d"))
    history[-1]["content"][-1].pop("cache_control")
    await turn(api, request(*history, *returned(content, "a file"), nonce="ead88"))
    first, second, third = (dispatch.spec.token_ids for dispatch in api.cluster.dispatches)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert prompt_of(api).count("<tool_response>\na file") == 2


async def test_results_that_are_errors_or_blocks_and_a_reminder_behind_them() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    calls = [{"type": "tool_use", "id": f"call_{n}", "name": "Bash", "input": {"command": "ls"}} for n in range(2)]
    history = returned(calls, "<tool_use_error>No.</tool_use_error>", "")
    history[1]["content"][0]["is_error"] = True
    history[1]["content"][1]["content"] = blocks
    history[1]["content"].append({"type": "text", "text": "<system-reminder>\nBe quick.\n</system-reminder>"})
    api = saying("Done.")
    await turn(api, request(*history))
    prompt = prompt_of(api)
    assert prompt.index("No.</tool_use_error>") < prompt.index("one\ntwo") < prompt.index("Be quick.")


async def test_the_session_s_title_obeys_its_schema() -> None:
    api = saying('{"title": "A look around"}')
    content, _ = await turn(api, title_request())
    assert json.loads(content[0]["text"]) == {"title": "A look around"}
    assert api.cluster.grammar is not None


async def test_tokens_are_counted_as_the_turn_takes_them() -> None:
    api = saying("Done.")
    asked = request()
    counted = {name: asked[name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = await sent(api, counted, "/v1/messages/count_tokens?beta=true")
    _, delta = await turn(api, asked)
    usage = delta["usage"]
    assert answer.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_the_check_of_the_connection_and_the_key_are_answered() -> None:
    api = saying("Done.", api_key="none")
    assert (await api.http.head("/")).status_code == 200
    await turn(api, request())
    wrong = await api.http.post(PATH, json=request(), headers={**HEADERS, "x-api-key": "other"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124"])
async def test_a_tool_that_the_server_would_run_is_refused(kind: str) -> None:
    answer = await sent(saying("x"), request(tools=[{"type": kind, "name": "x", "max_uses": 8}]))
    assert answer.status_code == 400
    assert "tools[0]" in answer.json()["error"]["message"]


def test_the_requests_are_such_that_caching_is_hard() -> None:
    assert system("a") != system("b")
    assert opening(marked=True) != opening(marked=False)
