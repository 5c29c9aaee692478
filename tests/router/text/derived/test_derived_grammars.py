"""Grammars of derived syntaxes: they accept what the template writes, and nothing that is no call of the tools."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvferry.router.text.parsers.derived.grammar import calls
from kvferry.router.text.parsers.syntax import Tool, grammar
from kvferry.structured_output import lark
from tests.api_parts import EOS, demo_text
from tests.router.text.derived.small_templates import CALLS, SCHEMAS, SINGLE, read, syntax, written

TOOLS = tuple(Tool(name, schema) for name, schema in SCHEMAS.items())
MARKS = (
    "<tool_call>", "</tool_call>", "<|calls|>", "<|called|>", "<|section|>", "<|section_end|>", "<|call|>",
    "<|call_end|>", "<|with|>", "[CALLS]", "[ID]", "[ARGS]", "</parameter>", "</arg_value>", "<|q|>", "</param>",
)  # fmt: skip
FULL: dict[str, Any] = {
    "place": "“São” <b>\nX", "days": -3, "deep": True, "tags": ["a", "b"], "where": {"a": "c", "b": 2},
}  # fmt: skip
TWO = [("get", FULL), ("put-it", {"place": "y"})]


@cache
def tokenizers(marked: bool) -> tuple[Tokenizer, LLTokenizer]:
    """The demo model's; `marked`: with the templates' marks as tokens."""
    own = Tokenizer.from_str(demo_text().tokenizer.library.to_str())
    if marked:
        own.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return own, LLTokenizer(own.to_str(), eos_token=[EOS])


def source(form: str, *, marked: bool, tools: tuple[Tool, ...] = TOOLS, **options: Any) -> str:
    own, _ = tokenizers(marked)
    tokens = {mark: own.token_to_id(mark) for mark in MARKS} if marked else {}
    given = {"forced": True, "parallel": True, **options}
    return grammar(partial(calls, syntax(form)), tools, partial(lark.spelled, tokens), **given)


def accepts(text: str, form: str, *, marked: bool, whole: bool = True, **options: Any) -> bool:
    """Whether the text is a whole output; or else, whether an output may begin so."""
    own, library = tokenizers(marked)
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(source(form, marked=marked, **options)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = own.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and (matcher.is_accepting() or not whole)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("form", CALLS)
def test_what_the_template_writes_is_accepted(form: str, marked: bool) -> None:
    for given in ([("get", FULL)], [("get", {})], TWO):
        if form == SINGLE and len(given) > 1:
            continue
        text = written(form, given).lstrip()
        assert accepts(text, form, marked=marked), text
        assert accepts(text, form, marked=marked, forced=False), text
        if len(given) > 1:
            assert not accepts(text, form, marked=marked, parallel=False)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("form", CALLS)
def test_forced_calls_are_calls_of_these_tools(form: str, marked: bool) -> None:
    call = written(form, [("get", FULL)]).lstrip()
    for text in ("Hello", "", f"Hello {call}", call[:-1], call.replace("get", "nosuch", 1)):
        assert not accepts(text, form, marked=marked), text
    named = TOOLS[1:]
    assert not accepts(call, form, marked=marked, tools=named)
    assert accepts(written(form, [("put-it", {"place": "x"})]).lstrip(), form, marked=marked, tools=named)


@pytest.mark.parametrize("form", CALLS)
def test_values_have_the_types_that_the_tool_declares(form: str) -> None:
    """Also keys: arguments that it does not list are refused."""
    call = written(form, [("get", {"days": 12345, "deep": True})]).lstrip()
    assert accepts(call, form, marked=False)
    head = call[: call.index("12345")]
    assert accepts(f"{head}1", form, marked=False, whole=False)
    for wrong in ("x", "1.5", "true"):
        assert not accepts(head + wrong, form, marked=False, whole=False), wrong
    head = call[: call.index("days")]
    assert not accepts(f"{head}nights", form, marked=False, whole=False)


@pytest.mark.parametrize("form", CALLS)
def test_text_is_free_until_a_call_begins(form: str) -> None:
    call = written(form, TWO if form != SINGLE else TWO[:1]).lstrip()
    for text in ("Hello", "", "a < b [c] {d}", call):
        assert accepts(text, form, marked=False, forced=False), text
    if form == SINGLE:
        return
    assert accepts(f"I look it up.\n{call}", form, marked=False, forced=False)
    begun = call[: call.index("get") + len("get")]
    assert not accepts(f"{begun}?!", form, marked=False, forced=False, whole=False)


def test_a_token_that_ends_the_output_is_not_in_the_grammar() -> None:
    """The engine ends at it, so that a grammar cannot demand it behind the last call."""
    tokens = {"<|call|>": 5, "<|end|>": 7}
    assert lark.spelled(tokens, "<|call|>a<|end|>", ends=(7,)) == '<[5]> "a"'
    assert lark.spelled(tokens, "<|end|>", ends=(7,)) == '""'
    assert lark.spelled(tokens, "<|end|>") == "<[7]>"


@pytest.mark.parametrize("form", CALLS)
def test_required_arguments_must_be_there(form: str) -> None:
    tool = Tool("get", {**SCHEMAS["get"], "required": ["days"]}, strict=True)
    assert accepts(written(form, [("get", {"days": 1})]).lstrip(), form, marked=False, tools=(tool,))
    assert not accepts(written(form, [("get", {"place": "x"})]).lstrip(), form, marked=False, tools=(tool,))


@pytest.mark.parametrize("form", ["xml", "pairs", "attributes", "quoted", "tree"])
def test_a_choice_of_texts_is_kept(form: str) -> None:
    tool = Tool("get", {"type": "object", "properties": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}}})
    for place, right in (("Oslo", True), ("Rome", True), ("Bern", False), ("Romeo", False)):
        text = written(form, [("get", {"place": place})]).lstrip()
        assert accepts(text, form, marked=False, tools=(tool,)) == right


@pytest.mark.parametrize("form", CALLS)
def test_tools_without_a_schema_take_any_arguments(form: str) -> None:
    tool = Tool("get", {"type": "object"})
    given = [("get", {"any": "x", "more": "y"})]
    text = written(form, given).lstrip()
    assert accepts(text, form, marked=False, tools=(tool,))
    assert read(form, [text]) == ("", given)
