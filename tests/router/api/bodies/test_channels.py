"""gpt-oss's messages on channels, through the whole API: what a client sees of them, and what binds them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvferry.protocol.errors import ConfigError
from kvferry.router.text.parsers.derived.derive import Derived
from kvferry.router.text.parsers.families import check_channels, dialect, thinking
from tests.api_parts import MESSAGES, Api, demo_text, error_of, events, named_events
from tests.harmony_model import ANALYSIS, FINAL, ON, channels_api, harmony_text

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, CLOCK]
ARGUMENTS = '{"place": "<|end|> Oslo"}'.replace("<|end|>", "< end|>")
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
NOW = " to=functions.now<|channel|>commentary json<|message|>{}"
THOUGHT = f"{ANALYSIS}We need the weather.{ON}"
ANSWER = f"{THOUGHT}{FINAL}It is sunny.<|return|>"
CALLS = f"{THOUGHT}<|channel|>commentary<|message|>I look.{ON}{CALL}{ON}{NOW}<|call|>"


def prompt_of(api: Api) -> str:
    return harmony_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


@cache
def grammar_tokenizer() -> LLTokenizer:
    model = harmony_text()
    return LLTokenizer(model.tokenizer.library.to_str(), eos_token=list(model.facts.eos_token_ids))


def lets(api: Api, text: str) -> bool:
    """Whether the grammar of the last request lets this be the whole output."""
    model, grammar = harmony_text(), api.cluster.grammar
    assert grammar.kind == "lark"
    matcher = LLMatcher(grammar_tokenizer(), LLMatcher.grammar_from_lark(grammar.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = model.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


async def seen(api: Api, **body: Any) -> dict[str, Any]:
    """What a chat's stream comes to."""
    choices = [chunk["choices"][0] for chunk in events(await api.chat(stream=True, **body))[:-1]]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        calls.setdefault(call["index"], []).extend(call["function"].get(key, "") for key in ("name", "arguments"))
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning_content": "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "calls": [(parts[0], "".join(parts[1:])) for parts in calls.values()],
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1].get("stop_reason"),
    }


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_an_answer_and_its_reasoning(per_output: int) -> None:
    api = channels_api(ANSWER, per_output=per_output)
    body = (await api.chat()).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is sunny.", "We need the weather.")
    assert message["reasoning"] == message["reasoning_content"]
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)
    text = harmony_text()
    thought = text.encode("<|message|>We need the weather.<|end|>", add_special_tokens=False)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert body["usage"]["completion_tokens"] == len(text.encode(ANSWER, add_special_tokens=False))
    assert await seen(api) == {
        "content": "It is sunny.", "reasoning_content": "We need the weather.", "calls": [],
        "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    hidden = (await api.chat(include_reasoning=False)).json()["choices"][0]["message"]
    assert (hidden["content"], hidden.get("reasoning_content")) == ("It is sunny.", None)
    for shown in ({"skip_special_tokens": False}, {"include_stop_str_in_output": True}):
        assert (await api.chat(**shown)).json()["choices"][0]["message"] == message


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_calls(per_output: int) -> None:
    api = channels_api(CALLS, per_output=per_output)
    choice = (await api.chat(tools=TOOLS)).json()["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "We need the weather.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": "{}"}]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert await seen(api, tools=TOOLS) == {
        "content": "I look.", "reasoning_content": "We need the weather.",
        "calls": [("get_weather", ARGUMENTS), ("now", "{}")], "finish_reason": "tool_calls", "stop_reason": None,
    }  # fmt: skip


async def test_without_tools_what_goes_to_one_is_text() -> None:
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        api = channels_api(f"{CALL}<|call|>")
        message = (await api.chat(**asked)).json()["choices"][0]["message"]
        assert (message["content"], "tool_calls" in message) == (ARGUMENTS, False)
        assert "functions" not in prompt_of(api)
        assert api.cluster.grammar is None


async def test_an_output_that_is_cut_anywhere_shows_no_head_and_no_mark() -> None:
    api = channels_api(CALLS)
    for bound in range(1, len(harmony_text().encode(CALLS, add_special_tokens=False))):
        asked = {"tools": TOOLS, "max_tokens": bound}
        choice, stream = (await api.chat(**asked)).json()["choices"][0], await seen(api, **asked)
        message = choice["message"]
        assert choice["finish_reason"] == stream["finish_reason"] == "length"
        assert "We need the weather.".startswith(message.get("reasoning_content", ""))
        assert "I look.".startswith(message["content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        for call, whole in zip(calls, (ARGUMENTS, "{}"), strict=False):
            assert whole.startswith(call["arguments"]) or call["arguments"] == "{}"
        assert stream["content"] == (message["content"] or "")
        assert [tuple(call.values()) for call in calls] == stream["calls"]


async def test_the_choice_of_tools_is_enforced_by_a_grammar() -> None:
    api = channels_api(ANSWER)
    await api.chat(tools=TOOLS)
    free = [f"{THOUGHT}{FINAL}Hi", f"{FINAL}Hi", CALLS, f"{THOUGHT}{CALL}", f"{THOUGHT}{THOUGHT}{NOW}"]
    assert all(lets(api, text.removesuffix("<|call|>")) for text in free)
    wrong = [
        CALL.replace("place", "plaice"), CALL.replace("get_", "set_"), "Hi", THOUGHT, f"{CALL} so",
        CALL.replace("<|message|>", ""), CALL.replace("commentary", "musing"),
    ]  # fmt: skip
    assert not any(lets(api, text) for text in wrong)
    await api.chat(tools=TOOLS, tool_choice="required")
    assert lets(api, f"{THOUGHT}{CALL}{ON}{THOUGHT}{NOW}")
    assert not lets(api, f"{THOUGHT}{FINAL}Hi")
    await api.chat(tools=TOOLS, parallel_tool_calls=False)
    assert lets(api, f"{THOUGHT}{CALL}")
    assert not lets(api, f"{CALL}{ON}{NOW}")
    await api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert lets(api, f"{THOUGHT}{NOW}")
    assert not lets(api, CALL)
    named = channels_api(f"{THOUGHT}{NOW}<|call|>")
    choice = {"type": "function", "function": {"name": "now"}}
    assert (await named.chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_in_json_binds_the_final_channel_alone() -> None:
    api, schema = channels_api(ANSWER), {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    await api.chat(response_format=asked)
    for head in (FINAL, FINAL.replace("final", "final <|constrain|>json")):
        assert lets(api, f'{THOUGHT}{head}{{"a": 1}}')
        assert not lets(api, f'{THOUGHT}{head}{{"b": 1}}')
    assert not lets(api, f'<|channel|>commentary<|message|>So.{ON}{FINAL}{{"a": 1}}')
    await api.chat(response_format=asked, tools=TOOLS)
    assert lets(api, f'{THOUGHT}{FINAL}{{"a": 1}}')
    assert lets(api, f"{THOUGHT}{CALL}")
    assert not lets(api, f"{THOUGHT}{FINAL}Hi")


async def test_an_answer_is_continued() -> None:
    api = channels_api(f" sunny.{ON}{NOW}<|call|>")
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    choice = (await api.chat(messages=messages, continue_final_message=True, tools=TOOLS)).json()["choices"][0]
    assert choice["message"]["content"] == " sunny."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert lets(api, " sunny.")
    assert lets(api, f" sunny.{ON}{THOUGHT}{NOW}")
    assert not lets(api, f" sunny.{ON}{NOW.replace('now', 'then')}")
    await api.chat(messages=messages, continue_final_message=True, tools=TOOLS, tool_choice="required")
    assert not lets(api, " sunny.")
    assert lets(api, f" sunny.{ON}{NOW}")


@pytest.mark.parametrize("per_output", [1, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_items_in_their_order(stream: bool, per_output: int) -> None:
    api = channels_api(CALLS, per_output=per_output)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body = {"input": "Hello", "tools": tools, "stream": stream, "reasoning": {"effort": "low"}}
    response = await api.http.post("/v1/responses", json=body)
    output = (named_events(response)[-1]["response"] if stream else response.json())["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == "We need the weather."
    assert output[1]["content"][0]["text"] == "I look."
    assert [(item["name"], item["arguments"]) for item in output[2:]] == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert "Reasoning: low" in prompt_of(api)


async def test_parts_keep_their_order_where_many_tokens_come_at_once() -> None:
    text = f"<|channel|>commentary<|message|>I look.{ON}{THOUGHT}{CALL}<|call|>"
    tools = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]  # type: ignore[index]
    for per_output in (1, 100):
        api = channels_api(text, per_output=per_output)
        asked = {"messages": MESSAGES, "max_tokens": 100, "tools": tools, "thinking": {"type": "enabled"}}
        answer = (await api.http.post("/v1/messages", json=asked)).json()
        assert [block["type"] for block in answer["content"]] == ["text", "thinking", "tool_use"]
        assert answer["content"][2]["input"] == json.loads(ARGUMENTS)
        assert answer["stop_reason"] == "tool_use"


def call(name: str, call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_conversation_is_put_as_the_template_wants_it() -> None:
    api = channels_api(ANSWER)
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "And kind."},
        *MESSAGES,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("get_weather", "a", '{"place": "Oslo"}'), call("now", "b")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reasoning": "Done.", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ]
    response = await api.chat(messages=history, tools=TOOLS, reasoning_effort="high")
    assert response.status_code == 200, response.text
    result = "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>{}<|end|>".format
    results = result("get_weather", '"sunny"'), result("now", '"12:00"')
    assert prompt_of(api) == (
        "<|start|>system<|message|>You help.\nReasoning: high\nYear: 20<|end|>"
        "<|start|>developer<|message|>Be brief.\n\nAnd kind.\nnamespace functions {\n// \ntype get_weather = (_: "
        "{place: string,}) => any;\n// The time.\ntype now = (_: {}) => any;\n}<|end|>"
        "<|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"place": "Oslo"}<|call|>'
        f"{results[0]}"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        f"{results[1]}"
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|><|start|>user<|message|>Thanks<|end|>"
        "<|start|>assistant"
    )


async def test_results_without_an_id_are_those_of_the_calls_in_their_order() -> None:
    api = channels_api(ANSWER)
    calls = [call("now", "a"), call("get_weather", "b")]
    results = [{"role": "tool", "content": text} for text in ("12:00", "sunny", "cold")]
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert (await api.chat(messages=history)).status_code == 200
    told = prompt_of(api).split("<|start|>")[3:-1]
    assert [each.split(" ")[0].split("<")[0] for each in told] == [
        "assistant", "functions.now", "assistant", "functions.get_weather", "functions.get_weather",
    ]  # fmt: skip
    assert [json.loads(each.split("<|message|>")[1].split("<")[0]) for each in told[1::2]] == ["12:00", "sunny"]


async def test_the_older_names_of_calls_are_put_likewise() -> None:
    api = channels_api(ANSWER)
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    assert (await api.chat(messages=history)).status_code == 200
    assert prompt_of(api).endswith(
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|><|start|>functions.now "
        'to=assistant<|channel|>commentary<|message|>"12:00"<|end|><|start|>assistant'
    )


async def test_parsers_may_be_turned_off() -> None:
    plain = channels_api(ANSWER, tool_call_parser="none", reasoning_parser="none")
    message = (await plain.chat()).json()["choices"][0]["message"]
    assert message["content"] == "analysisWe need the weather.assistantfinalIt is sunny."
    calls = channels_api(ANSWER, reasoning_parser="none")
    message = (await calls.chat()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "We need the weather.\nIt is sunny.", "refusal": None}
    thoughts = channels_api(ANSWER, tool_call_parser="none", reasoning_parser="openai_gptoss")
    message = (await thoughts.chat()).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is sunny.", "We need the weather.")
    refused = await thoughts.chat(tools=TOOLS)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "tools")


def test_parsers_that_do_not_go_together_are_refused() -> None:
    model = harmony_text()
    assert model.template is not None
    source, own = model.template.source, model.tokenizer

    def check(calls: str, thoughts: str, tokenizer: Any = own) -> None:
        check_channels(tokenizer, dialect(calls, source, Derived(), knows_tools=True), thinking(thoughts, source))

    for calls, thoughts in (("auto", "auto"), ("openai", "openai_gptoss"), ("none", "auto"), ("openai", "none")):
        check(calls, thoughts)
    for calls, thoughts in (("hermes", "auto"), ("auto", "qwen3"), ("mistral", "openai_gptoss")):
        with pytest.raises(ConfigError, match="openai_gptoss work only with each other"):
            check(calls, thoughts)
    check("hermes", "none")
    with pytest.raises(ConfigError, match="has no token"):
        check("auto", "auto", demo_text().tokenizer)


async def test_instructions_in_mid_conversation_stay_where_they_were_said() -> None:
    """What stands before them stays the same prompt, whose cached prefix serves on."""
    api, later = channels_api(ANSWER), channels_api(ANSWER)
    begun = [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "Hi."}]
    assert (await api.chat(messages=[*begun, {"role": "user", "content": "And?"}])).status_code == 200
    history = [*begun, {"role": "developer", "content": "Now rhyme."}, {"role": "user", "content": "And?"}]
    assert (await later.chat(messages=history)).status_code == 200
    before = prompt_of(api).removesuffix("<|start|>user<|message|>And?<|end|><|start|>assistant")
    assert prompt_of(later) == (
        f"{before}<|start|>developer<|message|># Instructions\n\nNow rhyme.<|end|>"
        "<|start|>user<|message|>And?<|end|><|start|>assistant"
    )


async def test_a_budget_ends_the_analysis() -> None:
    api = channels_api(ANSWER)
    await api.chat(thinking_token_budget=4)
    thought = f"{ANALYSIS}one two three four"
    assert lets(api, f"{thought}{ON}{FINAL}It is as sunny as it has ever been.")
    assert lets(api, f"{ANALYSIS}one{ON}{FINAL}Sunny.")
    assert lets(api, f"{FINAL}Sunny.")
    assert not lets(api, f"{thought} five{ON}{FINAL}Sunny.")
    assert not lets(api, f"{thought}{ON}{thought}{ON}{FINAL}Sunny.")
    await api.chat(thinking_token_budget=4, tools=TOOLS, tool_choice="required")
    assert lets(api, f"{thought}{ON}{NOW}")
    assert lets(api, f"{thought}{ON}{NOW}{ON}{NOW}")
    assert not lets(api, f"{thought} five{ON}{NOW}")
    assert not lets(api, f"{thought}{ON}{NOW}{ON}{thought}{ON}{NOW}")
