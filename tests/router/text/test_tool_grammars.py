"""Grammars of calls, held to the library that reads them: what each family's parser reads is what they let through."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.families import CALLS, MARKERS, REASONING
from kvferry.router.text.parsers.family_syntax import WRITERS
from kvferry.router.text.parsers.hermes import LedHermesParser
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.parsers.syntax import Tool, grammar
from kvferry.structured_output import lark
from tests.api_parts import EOS, demo_text

ADD = Tool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
TOOLS = (ADD, NOW)
CALL = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": -2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": -2}}]',
    "pythonic": "[add(a=1, b=-2)]",
}
TWO = {
    "hermes": f'{CALL["hermes"]}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    "llama3_json": f'{CALL["llama3_json"]}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'{CALL["mistral"][:-1]}, {{"name": "now", "arguments": {{}}}}]',
    "pythonic": "[add(a=1, b=-2), now()]",
}
WRONG = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": "x"',
    "llama3_json": '{"name": "add", "parameters": {"a": "x"',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "x"',
    "pythonic": "[add(a='x'",
}


@cache
def tokenizers(marked: bool) -> tuple[Tokenizer, LLTokenizer]:
    """The demo model's; `marked`: with the markers as tokens, as models that were trained on them have."""
    own = Tokenizer.from_str(demo_text().tokenizer.library.to_str())
    if marked:
        own.add_special_tokens([AddedToken(marker, normalized=False) for marker in sorted(MARKERS)])
    return own, LLTokenizer(own.to_str(), eos_token=[EOS])


def written(family: str, *, marked: bool = False, tools: Sequence[Tool] = TOOLS, **options: Any) -> str:
    tokenizer, _ = tokenizers(marked)

    def spell(marker: str) -> str:
        token_id = tokenizer.token_to_id(marker)
        return lark.text(marker) if token_id is None else lark.token(token_id)

    return grammar(WRITERS[family], tools, spell, **{"forced": False, "parallel": True, **options})


def accepts(source: str, text: str, *, marked: bool = False) -> bool:
    """Whether the text is a whole output."""
    tokenizer, library = tokenizers(marked)
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def begins(source: str, text: str, *, marked: bool = False) -> bool:
    """Whether an output may begin so."""
    tokenizer, library = tokenizers(marked)
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(source), log_level=0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids)


def parsed(family: str, text: str, make: type[CallParser] | None = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = (make or CALLS[family])(["add", "now"])
    found = [parser.feed(text), parser.finish()]
    calls = merged([delta for each in found for delta in each.calls])
    return "".join(each.text for each in found), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", CALLS)
def test_forced_calls_are_calls_and_nothing_else(family: str, marked: bool) -> None:
    call, two = CALL[family], TWO[family]
    if family == "mistral" and marked:
        call, two = (
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2}',
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2}[TOOL_CALLS]now[ARGS]{}',
        )
    source = written(family, marked=marked, forced=True)
    assert accepts(source, call, marked=marked)
    assert accepts(source, two, marked=marked)
    assert parsed(family, two) == ("", [("add", {"a": 1, "b": -2}), ("now", {})])
    for text in ("Hello", "", f"Hello {call}", f"{call} bye", call[:-1]):
        assert not accepts(source, text, marked=marked), text
    single = written(family, marked=marked, forced=True, parallel=False)
    assert accepts(single, call, marked=marked)
    assert not accepts(single, two, marked=marked)
    named = written(family, marked=marked, forced=True, tools=(NOW,))
    assert not accepts(named, call, marked=marked)


@pytest.mark.parametrize("family", CALLS)
def test_what_begins_as_a_call_goes_on_as_one_and_all_else_is_free(family: str) -> None:
    source = written(family)
    for text in ("Hello", "", '{"a": [1]}', "[1, 2]", "a < b <tool", CALL[family], TWO[family]):
        assert accepts(source, text), text
    assert begins(source, WRONG[family][:-4])
    assert not begins(source, WRONG[family])
    if family in ("hermes", "mistral"):
        assert accepts(source, f"I look it up.\n{CALL[family]}")


@pytest.mark.parametrize("family", CALLS)
def test_arguments_are_those_that_the_tool_declares(family: str) -> None:
    source = written(family, forced=True, tools=(ADD,))
    head = CALL[family][: CALL[family].index("a" + ("=" if family == "pythonic" else '": 1'))]
    for wrong in ("c", "b"):
        assert not begins(source, f"{head}{wrong}" + ("=" if family == "pythonic" else '": '))


def test_keyword_arguments_may_leave_out_what_is_optional() -> None:
    source = written("pythonic", forced=True, tools=(ADD,))
    assert accepts(source, '[add(a=1, note="x", b=2)]')
    assert not accepts(source, "[add(a=1)]")
    optional = Tool("f", {"type": "object", "properties": {name: {"type": "boolean"} for name in "xyz"}})
    source = written("pythonic", forced=True, parallel=False, tools=(optional,))
    for text in ("[f()]", "[f(x=true)]", "[f(y=true)]", "[f(x=true, z=false)]", "[f(x=true, y=true, z=true)]"):
        assert accepts(source, text), text
    assert not accepts(source, "[f(, y=true)]")


@pytest.mark.parametrize("marked", [False, True])
def test_reasoning_comes_before_what_is_forced(marked: bool) -> None:
    call, thinking = CALL["hermes"], REASONING["qwen3"]
    begun = written("hermes", marked=marked, forced=True, thinking=thinking, opened=True)
    assert accepts(begun, f"Hm. {{}} Well.\n</think>\n\n{call}", marked=marked)
    assert not accepts(begun, call, marked=marked)
    free = written("hermes", marked=marked, forced=True, thinking=thinking)
    assert accepts(free, call, marked=marked)
    assert accepts(free, f"<think>\nHm.\n</think>\n\n{call}", marked=marked)
    assert not accepts(free, "<think>\nHm.\n</think>\n\nHello", marked=marked)
    auto = written("hermes", marked=marked, thinking=thinking, opened=True)
    assert accepts(auto, "Hm.</think>\n\nHello", marked=marked)
    assert accepts(auto, f"Hm.</think>\n\n{call}", marked=marked)


def test_a_model_that_knows_no_tools_says_first_whether_it_calls() -> None:
    source = written("hermes", led=True, parallel=False)
    assert accepts(source, "<text>Hello")
    assert accepts(source, CALL["hermes"])
    assert not begins(source, "Hello")
    assert parsed("hermes", "<text>Hello</text>", LedHermesParser) == ("Hello", [])
    assert parsed("hermes", CALL["hermes"], LedHermesParser) == ("", [("add", {"a": 1, "b": -2})])


def test_an_answer_that_is_no_call_may_be_bound_too() -> None:
    source = written("hermes", answer=lark.schema({"type": "boolean"}))
    assert accepts(source, "true")
    assert accepts(source, CALL["hermes"])
    assert not begins(source, "Hello")


SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"type": "string"}, {"enum": ["a", 1, None]}, {"type": "null"}]),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(
            lambda properties: {"type": "object", "properties": properties},
            st.dictionaries(st.sampled_from(["a", "b-c", "properties", "é", '"']), inner, max_size=3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("family", CALLS)
@given(schemas=st.dictionaries(st.sampled_from(["a", "b", "c"]), SCHEMAS, max_size=3), required=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_schema_makes_a_grammar(family: str, schemas: dict[str, Any], required: bool) -> None:
    tool = Tool("f", {"type": "object", "properties": schemas, "required": sorted(schemas) if required else []})
    source = written(family, forced=True, tools=(tool, NOW))
    _, library = tokenizers(False)
    error: Callable[..., str] = LLMatcher.validate_grammar
    assert not error(LLMatcher.grammar_from_lark(source), library), source
