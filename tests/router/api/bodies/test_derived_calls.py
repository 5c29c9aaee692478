"""Chats with tools where the model's template has a syntax of its own, which no parser knows by name."""

from __future__ import annotations

import json

import pytest

from tests.api_parts import events
from tests.router.api.bodies.test_tools import WEATHER, Api, api_of, lets, prompt_of
from tests.router.text.derived.small_templates import template

NUMBER = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
TOOLS = [WEATHER, NUMBER]
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=place>\nOslo\n</parameter>\n</function>\n</tool_call>"
    "<tool_call>\n<function=now>\n<parameter=zone>\n5\n</parameter>\n</function>\n</tool_call>"
)


def own(text: str, *, per_output: int = 1) -> Api:
    return api_of(text, template=template("xml").source, per_output=per_output)


async def test_calls_are_read_with_the_types_of_the_tools() -> None:
    message = (await own(CALL).chat(tools=TOOLS)).json()["choices"][0]["message"]
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert found == [("get_weather", {"place": "Oslo"}), ("now", {"zone": "5"})]


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_calls_are_streamed(per_output: int) -> None:
    *chunks, done = events(await own(f"I see. {CALL}", per_output=per_output).chat(tools=TOOLS, stream=True))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == "I see."
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
    shown = ["".join(each["function"]["arguments"] for each in deltas if each["index"] == at) for at in (0, 1)]
    assert list(map(json.loads, shown)) == [{"place": "Oslo"}, {"zone": "5"}]


async def test_the_model_is_asked_in_its_own_words() -> None:
    api = own("x")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    await api.chat(
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "noon"},
        ],
    )
    assert "<function=now>\n<parameter=zone>\nCET\n</parameter>" in prompt_of(api)
    assert "<tools>" not in prompt_of(api)


async def test_required_and_named_calls_obey_a_grammar_in_it() -> None:
    first, second = (f"{each}</tool_call>" for each in CALL.split("</tool_call>")[:2])
    api = own("x")
    await api.chat(tools=TOOLS, tool_choice="required")
    assert lets(api, CALL)
    assert lets(api, first)
    assert not lets(api, "Hello")
    await api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert lets(api, second)
    assert not lets(api, first)
    await api.chat(tools=TOOLS)
    assert lets(api, "Hello")
    assert lets(api, f"I see.\n{first}")
    assert not lets(api, first.replace("place", "time"))


async def test_a_malformed_call_is_text() -> None:
    for text in ("<tool_call>\n<function=nosuch>\n</function>\n</tool_call>", "<tool_call>5", "a <tool"):
        message = (await own(text).chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert (message["content"], "tool_calls" in message) == (text, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_marks_around_text_are_not_shown_with_or_without_tools(stream: bool, tools: object) -> None:
    source = ">>>${recipient}{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}>>>"
    response = await api_of("all\nHello >>> you", template=source).chat(tools=tools, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello >>> you"
    else:
        assert response.json()["choices"][0]["message"]["content"] == "Hello >>> you"
