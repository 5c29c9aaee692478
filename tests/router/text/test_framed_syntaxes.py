"""Syntaxes with marks around text, too (Kimi K3, functionary 3.2), firefunction's, and Command-R+'s call of no tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvferry.router.text.parsers.derived.grammar import calls
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import ToolSyntax
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.parsers.rules import Rules
from kvferry.router.text.parsers.syntax import Tool, grammar
from kvferry.router.text.template import ChatTemplate
from kvferry.structured_output import lark
from tests.api_parts import EOS, demo_text

WHERE = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"]}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "where": WHERE,
        "all": {"type": "boolean"},
    },
    "required": ["place"],
}
SCHEMAS: Mapping[str, Any] = {"get": SCHEMA, "all-now": {"type": "object", "properties": {}}}
SHOWS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
ACTION = '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
TEMPLATES = {
    "kimi": "{# Kimi K3 tool calls must be mappings #}{{ tools }}" + SHOWS + "{% endfor %}",
    "functionary": ">>>${recipient}{{ tools }}" + SHOWS + "{% endfor %}",
    "firefunction": "{{ functions }} Today is {{ datetime }}." + SHOWS + "{% if m.tool_calls %} functools["
    "{% for c in m.tool_calls %}" + CALL + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|end|>{% endfor %}",
    "command": "{{ tools }}Use the `directly-answer` tool if calling the other tools is unnecessary." + SHOWS
    + "{% if m.tool_calls %}\nAction:\n```json\n[{% for c in m.tool_calls %}    " + ACTION
    + "{{ ',' if not loop.last }}"
    "{% endfor %}]```{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
}  # fmt: skip
NOTHING = "<|open|>tools<|sep|>"
K3 = (
    '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>'
    '<|open|>argument key="place" type="string"<|sep|>São "X"\n<|open|>5<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>-3<|close|>argument<|sep|>'
    '<|open|>argument key="where" type="object"<|sep|>{"a": "é👩", "b": null}<|close|>argument<|sep|>'
    '<|open|>argument key="all" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="all-now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
ARGUMENTS = '{"place": "São \\"X\\"\\n<|open|>5", "days": -3, "where": {"a": "é👩", "b": null}, "all": true}'
TEXTS = {
    "kimi": f"I look.<|close|>response<|sep|>{K3}<|close|>message<|sep|>",
    "functionary": f"all\nI look.>>>get\n{ARGUMENTS}>>>all-now\n{{}}",
    "firefunction": f'I look. functools[{{"name": "get", "arguments": {ARGUMENTS}}}, '
    '{"name": "all-now", "arguments": {}}]',
    "command": f'Action:\n```json\n[    {{"tool_name": "get", "parameters": {ARGUMENTS}}},    '
    '{"tool_name": "all-now", "parameters": {}}]```',
}  # fmt: skip
WANTED = [("get", json.loads(ARGUMENTS)), ("all-now", {})]


@cache
def syntax(model: str) -> ToolSyntax:
    dialect = replace(demo_text(), template=ChatTemplate(TEMPLATES[model], {"eos_token": "<|end|>"})).dialect
    assert dialect is not None
    assert dialect.own
    assert dialect.syntax is not None
    return dialect.syntax


def read(model: str, pieces: list[str], *, is_whole: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    parser = SyntaxParser(syntax(model), SCHEMAS, patient=True)
    found = [*map(parser.feed, pieces), parser.finish(is_whole=is_whole)]
    made = merged([delta for each in found for delta in each.calls])
    return "".join(each.text for each in found), [(call.name, json.loads(call.arguments)) for call in made]


@pytest.mark.parametrize("model", TEMPLATES)
def test_calls_are_read_whole_and_cut_everywhere(model: str) -> None:
    text = TEXTS[model]
    shown, made = read(model, [text])
    assert (shown.strip(), made) == ("" if model == "command" else "I look.", WANTED)
    assert read(model, list(text)) == (shown, made)
    for at in range(1, len(text)):
        assert read(model, [text[:at], text[at:]]) == (shown, made)


@pytest.mark.parametrize(
    ("model", "text", "shown"),
    [
        (
            "kimi",
            "Hello <|close|> <|open|>x<|close|>response<|sep|><|close|>message<|sep|>",
            "Hello <|close|> <|open|>x",
        ),
        ("kimi", "<|open|>response<|sep|>Hello", "Hello"),
        ("kimi", "", ""),
        ("functionary", "all\n>>> print(1)\n1", ">>> print(1)\n1"),
        ("functionary", "nosuch\n{}", "nosuch\n{}"),
        ("functionary", "Hello", "Hello"),
        ("functionary", "get\n[1]", "get\n[1]"),
        ("functionary", "", ""),
        ("firefunction", "use functools[0]", "use functools[0]"),
        ("command", 'Action:\n```json\n[    {"tool_name": "directly-answer", "parameters": {}}]```Four.', "Four."),
        ("command", 'Action:\n```json\n[    {"tool_name": "directly-answer", "parameters": {}}]```', ""),
    ],
)
def test_text_is_shown_without_the_marks_around_it(model: str, text: str, shown: str) -> None:
    for pieces in ([text], list(text)):
        assert read(model, pieces) == (shown, [])


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_malformed_call_is_text(model: str) -> None:
    text = TEXTS[model].replace("get", "nosuch").replace("all-now", "none")
    whole = read(model, [text])
    assert whole[1] == []
    assert "nosuch" in whole[0]
    assert "é👩" in whole[0]
    assert read(model, list(text)) == whole


@cache
def tokenizer(marked: bool) -> tuple[Tokenizer, LLTokenizer]:
    own = Tokenizer.from_str(demo_text().tokenizer.library.to_str())
    if marked:
        own.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<|open|>", "<|close|>", "<|sep|>")])
    return own, LLTokenizer(own.to_str(), eos_token=[EOS])


def accepts(model: str, text: str, *, ends: bool = True, marked: bool = False, **options: Any) -> bool:
    own, library = tokenizer(marked)
    ids = {mark: own.token_to_id(mark) for mark in ("<|open|>", "<|close|>", "<|sep|>") if marked}
    tools = [Tool(name, schema) for name, schema in SCHEMAS.items()]
    options = {"forced": False, "parallel": True, **options}
    source = grammar(partial(calls, syntax(model)), tools, partial(lark.spelled, ids), **options)
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = own.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(found) == len(found) and (matcher.is_accepting() or not ends))


MODELS = [*((model, False) for model in TEMPLATES if model != "kimi"), ("kimi", True)]


@pytest.mark.parametrize(("model", "marked"), MODELS)
def test_a_grammar_bounds_calls(model: str, marked: bool) -> None:
    called = TEXTS[model].replace("<|open|>5", "5")
    alone = called.removeprefix("all\nI look.>>>").removeprefix("I look. ").removeprefix("I look.")
    bounded = partial(accepts, model, marked=marked)
    assert bounded(alone, forced=True)
    assert bounded(called)
    wrong = called.replace('"days": -3', '"days": "x"').replace(">-3<", ">x<")
    assert not bounded(wrong, ends=False)
    for text in ("Hello", "all\nHello"):
        assert not bounded(text, forced=True)
    assert bounded("all\nHello" if model == "functionary" else "Hello")
    if model == "kimi":
        assert bounded("Hello<|close|>response<|sep|><|close|>message<|sep|>")
        assert not bounded("Hello<|open|>nosuch", ends=False)
    if model == "command":
        reply = 'Action:\n```json\n[    {"tool_name": "directly-answer", "parameters": {}}]```'
        assert bounded(reply + " Four.")
        assert not bounded(reply, ends=False, forced=True)


def test_reasoning_ends_with_marks_that_begin_with_a_token() -> None:
    """Kimi K3's end of reasoning has words between its tokens."""
    thinking = Thinking(("<|open|>think<|sep|>",), ("<|close|>think<|sep|><|open|>response<|sep|>",))
    text = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>{TEXTS['kimi'].replace('<|open|>5', '5')}"
    assert accepts("kimi", text, marked=True, thinking=thinking, opened=True)
    spell = partial(lark.spelled, {"<|close|>": 7, "<|sep|>": 8})
    assert Rules(spell).up_to("<|close|>think<|sep|>") == '(T0 <[7]> "think" <[8]>)'


def test_firefunction_gets_functions_as_text() -> None:
    text = replace(demo_text(), template=ChatTemplate(TEMPLATES["firefunction"], {}))
    tools = [{"type": "function", "function": {"name": "get", "description": "É", "parameters": SCHEMA}}]
    prompt = text.render([{"role": "user", "content": "Hi"}], tools=tools)
    functions, _, rest = prompt.partition(" Today is ")
    assert json.loads(functions) == [tools[0]["function"]]
    assert "É" in functions
    assert rest[:4].isdigit()
    assert text.render([{"role": "user", "content": "Hi"}]).startswith("[] Today is ")
