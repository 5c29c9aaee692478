from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from kvferry.router.text.template import ChatTemplate
from tests.api_parts import MESSAGES, Api, FakeCluster, demo_text, error_of, events, says

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
KNOWING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<|im_start|>assistant\n"
)


def api_of(
    text: str, *, template: str | None = None, per_output: int = 1, finish: str = "stop", **text_model: Any
) -> Api:
    model = demo_text()
    if template is not None:
        model = replace(model, template=ChatTemplate(template, {}))
    return Api(FakeCluster(says(text, per_output=per_output, finish=finish)), replace(model, **text_model))


def prompt_of(api: Api) -> str:
    return demo_text().tokenizer.decode(api.cluster.dispatches[-1].spec.token_ids, skip_special_tokens=False)


def grammar_of(api: Api) -> str | None:
    grammar = api.cluster.grammar
    assert grammar is None or grammar.kind == "lark"
    return None if grammar is None else grammar.source


@cache
def grammar_tokenizer() -> LLTokenizer:
    return LLTokenizer(demo_text().tokenizer.library.to_str(), eos_token=[2])


def lets(api: Api, text: str) -> bool:
    """Whether the grammar of the last request lets this be the whole output."""
    matcher = LLMatcher(grammar_tokenizer(), LLMatcher.grammar_from_lark(grammar_of(api) or ""), log_level=0)
    ids = demo_text().encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


async def test_a_whole_answer_with_calls() -> None:
    choice = (await api_of(TWO).chat(tools=TOOLS)).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["refusal"]) == (None, None)
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert (first["type"], first["function"]) == (
        "function", {"name": "get_weather", "arguments": '{"place": "Oslo"}'},
    )  # fmt: skip
    assert second["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_a_streamed_answer_with_calls(per_output: int) -> None:
    response = await api_of(f"Let me see. {TWO}", template=KNOWING, per_output=per_output).chat(
        tools=TOOLS, stream=True
    )
    *chunks, done = events(response)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Let me see. "
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
    firsts = [delta for delta in deltas if "id" in delta]
    assert [(delta["index"], delta["type"], delta["function"]["name"]) for delta in firsts] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    assert all(delta.keys() == {"index", "function"} for delta in deltas if delta not in firsts)
    arguments = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == index) for index in (0, 1)]
    assert list(map(json.loads, arguments)) == [{"place": "Oslo"}, {}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_is_text(stream: bool) -> None:
    for text in (
        '<tool_call>\n{"name": "nosuch", "arguments": {}}\n</tool_call>',
        "<tool_call>get_weather(1)",
        "a <tool",
    ):
        response = await api_of(text, template=KNOWING).chat(tools=TOOLS, stream=stream)
        assert response.status_code == 200
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
            shown = "".join(choice["delta"].get("content") or "" for choice in choices)
            assert not any("tool_calls" in choice["delta"] for choice in choices)
        else:
            choices = response.json()["choices"]
            shown = choices[0]["message"]["content"]
            assert "tool_calls" not in choices[0]["message"]
        assert (shown, choices[-1]["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("per_output", [1, 7, 100])
async def test_a_call_whose_arguments_are_malformed_is_text_in_a_stream_too(per_output: int) -> None:
    """Nothing bounds this call: the client may stop the output in its middle."""
    text = 'See: <tool_call>\n{"name": "get_weather", "arguments": {"place": Oslo}}\n</tool_call> Well.'
    response = await api_of(text, template=KNOWING, per_output=per_output).chat(tools=TOOLS, stream=True, stop=["STOP"])
    choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
    assert not any("tool_calls" in choice["delta"] for choice in choices)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_call_that_is_cut_keeps_what_there_is() -> None:
    choice = (await api_of(CALL[:-25], finish="length").chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"pla')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_was_closed_in_time_is_whole_and_says_that_its_length_ended_it(choice: object) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice}
    whole = (await api_of(CALL, finish="closed").chat(**asked)).json()["choices"][0]
    chunks = events(await api_of(CALL, finish="closed").chat(**asked, stream=True))[:-1]
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {"place": "Oslo"}
    for shown in (whole, chunks[-1]["choices"][0]):
        assert (shown["finish_reason"], shown["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_json_that_was_closed_in_time_is_complete(stream: bool) -> None:
    response = await api_of('{"a": 1}', finish="closed").chat(
        response_format={"type": "json_object"}, tools=TOOLS, stream=stream
    )
    shown = events(response)[-2]["choices"][0] if stream else response.json()["choices"][0]
    assert (shown["finish_reason"], shown["stop_reason"]) == ("stop", "max_tokens")


async def test_how_an_answer_with_calls_ends() -> None:
    """As OpenAI's and vLLM's: who named the tool is told `stop`."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in (("auto", "tool_calls"), ("required", "tool_calls"), (named, "stop"), (None, "tool_calls")):
        body = (await api_of(CALL).chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
        assert (body["finish_reason"], len(body["message"]["tool_calls"])) == (reason, 1)


async def test_the_choice_is_enforced_by_a_grammar() -> None:
    api = api_of("x", template=KNOWING)
    await api.chat()
    assert grammar_of(api) is None
    await api.chat(tools=TOOLS, tool_choice="none")
    assert grammar_of(api) is None
    await api.chat(tools=TOOLS)
    assert lets(api, "Hello")
    assert lets(api, TWO)
    assert not lets(api, CALL.replace("place", "plaice"))
    await api.chat(tools=TOOLS, tool_choice="required")
    assert not lets(api, "Hello")
    assert lets(api, TWO)
    await api.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert lets(api, CALL)
    assert not lets(api, TWO)
    await api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not lets(api, CALL)
    assert lets(api, CALL.replace("get_weather", "now").replace('{"place": "Oslo"}', "{}"))
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    await api.chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert not lets(api, CALL)


async def test_a_template_that_knows_tools_is_given_them() -> None:
    api = api_of("x", template=KNOWING)
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Oslo"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    await api.chat(tools=TOOLS, messages=history)
    assert prompt_of(api) == (
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n[get_weather][now]<|im_start|>assistant"
    )
    await api.chat(tools=TOOLS, tool_choice="none")
    assert "[now]" not in prompt_of(api)


async def test_tools_are_described_to_a_model_whose_template_shows_none() -> None:
    api = api_of("<text>It is sunny.")
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Oslo"}'}}
    history = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "cold"}]},
    ]
    answer = (await api.chat(tools=TOOLS, messages=history)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("It is sunny.", "stop")
    prompt = prompt_of(api)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(WEATHER) in prompt
    assert prompt.endswith(
        f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\ncold\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert lets(api, "<text>It is sunny.")
    assert lets(api, CALL)
    assert not lets(api, TWO)
    await api.chat(tools=TOOLS, tool_choice="none")
    assert "# Tools" not in prompt_of(api)


async def test_a_router_whose_model_calls_no_tools_says_so() -> None:
    api = api_of("x", tool_call_parser="none")
    for fields, param in (({}, "tools"), ({"tool_choice": "required"}, "tool_choice")):
        response = await api.chat(tools=TOOLS, **fields)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert "--tool-call-parser" in error_of(response)["message"]
    assert (await api.chat(tools=TOOLS, tool_choice="none")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_older_names(stream: bool) -> None:
    api = api_of(CALL)
    functions = [tool["function"] for tool in TOOLS]
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    response = await api.chat(functions=functions, messages=history, function_call="auto", stream=stream)
    assert '{"name": "now", "arguments": {}}' in prompt_of(api)
    assert "12:00" in prompt_of(api)
    if not stream:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "function_call"
        assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"place": "Oslo"}'}
        return
    choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
    deltas = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert deltas[0]["name"] == "get_weather"
    assert "".join(delta["arguments"] for delta in deltas) == '{"place": "Oslo"}'
    assert choices[-1]["finish_reason"] == "function_call"


async def test_every_choice_has_calls_of_its_own() -> None:
    body = (await api_of(CALL).chat(tools=TOOLS, n=3)).json()
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
    assert len(ids) == 3


async def test_log_probabilities_cover_the_calls() -> None:
    body = (await api_of(CALL).chat(tools=TOOLS, logprobs=True)).json()
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]


async def test_the_official_client() -> None:
    api = api_of(f"One moment. {CALL}", template=KNOWING)
    http: Any = api.http
    client = openai.AsyncOpenAI(base_url="http://router/v1", api_key="x", http_client=http)
    asked: Any = {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "tools": TOOLS}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.message.tool_calls
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"place": "Oslo"}  # type: ignore[union-attr]
    async with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.message.tool_calls
    assert final.message.tool_calls[0].function.name == "get_weather"
    assert (final.message.content, final.finish_reason) == ("One moment. ", "tool_calls")


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<a>"
    "{% if think is not defined or think %}<think>\n{% endif %}{# <tool_call> </think> #}"
)


@pytest.mark.parametrize("per_output", [1, 4, 100])
async def test_reasoning_is_split_off_and_counted(per_output: int) -> None:
    thought, text = "Hm. Two and two.", "Four."
    api = api_of(f"{thought}\n</think>\n\n{text}", template=THINKING, per_output=per_output)
    body = (await api.chat()).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (text, thought, thought)
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    ids = demo_text().encode(f"{thought}\n</think>\n\n{text}", add_special_tokens=False)
    assert "</think>" in demo_text().tokenizer.decode(ids[:counted])
    assert "</think>" not in demo_text().tokenizer.decode(ids[: counted - 1])
    choices = [chunk["choices"][0]["delta"] for chunk in events(await api.chat(stream=True))[:-1]]
    assert "".join(delta.get("content") or "" for delta in choices) == text
    assert "".join(delta.get("reasoning_content") or "" for delta in choices) == thought
    hidden = (await api.chat(include_reasoning=False)).json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted


async def test_a_prompt_that_closes_the_reasoning_has_none() -> None:
    api = api_of("Four.", template=THINKING)
    body = (await api.chat(chat_template_kwargs={"think": False})).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_without_a_reasoning_parser_its_marks_are_text() -> None:
    api = api_of("Hm.</think>Four.", template=THINKING, reasoning_parser="none")
    body = (await api.chat()).json()
    assert body["choices"][0]["message"]["content"] == "Hm.</think>Four."
    assert "completion_tokens_details" not in body["usage"]


async def test_reasoning_comes_before_calls() -> None:
    api = api_of(f"Hm.\n</think>\n\n{CALL}", template=THINKING)
    message = (await api.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == (None, "Hm.", 1)


@pytest.mark.parametrize("template", [THINKING, KNOWING])
async def test_a_budget_of_reasoning_needs_a_model_whose_reasoning_a_token_ends(template: str) -> None:
    api = api_of("Four.", template=template)  # the demo model's vocabulary has no token </think>
    for budget, bound in ((5, "ends with a token"), (-1, "greater than or equal to 0")):
        response = await api.chat(thinking_token_budget=budget)
        assert (response.status_code, error_of(response)["param"]) == (400, "thinking_token_budget")
        assert bound in error_of(response)["message"]
