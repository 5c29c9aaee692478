"""Calls in every form of syntax: derived from a small template, and read back as the template writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import Form
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.template import ChatTemplate
from tests.api_parts import demo_text
from tests.router.text.derived.small_templates import (
    CALLS,
    EACH,
    HEAD,
    SCHEMAS,
    SINGLE,
    TREE,
    UNTOLD,
    derived,
    read,
    syntax,
    template,
    written,
)

FORMS = {
    **dict.fromkeys(("objects", "listed", "keyed", "numbered", "ids", "single"), Form.JSON),
    **dict.fromkeys(("xml", "pairs", "attributes", "wrapped", "tree"), Form.TAGGED),
    **dict.fromkeys(("python", "quoted"), Form.LITERAL),
}
ROUGH: dict[str, Any] = {
    "place": "\n“São” \"X\" & 'y'\\\n\t{1: [2]}, z=3 </b>",
    "days": -3,
    "deep": True,
    "tags": ["a, b", "]}", ""],
    "where": {"a": "c", "b": 2},
}
TWO = [("get", {"place": "Oslo", "days": 7}), ("put-it", {})]


@pytest.mark.parametrize("form", CALLS)
def test_the_form_is_derived(form: str) -> None:
    found = syntax(form)
    assert found.form == FORMS[form]
    assert (found.between is None) == (form == SINGLE)
    assert derived(form).shows_calls
    assert found.describe().count("\n") == 0


@pytest.mark.parametrize("form", CALLS)
def test_calls_are_read_back_at_once_and_cut_everywhere(form: str) -> None:
    for calls in ([("get", ROUGH)], [("get", {})], [*TWO, ("get", ROUGH)]):
        if form == SINGLE and len(calls) > 1:
            continue
        text = written(form, calls)
        assert read(form, [text]) == ("", calls)
        assert read(form, [text], patient=True) == ("", calls)
        assert read(form, list(text)) == ("", calls)
        for at in range(1, len(text)):
            assert read(form, [text[:at], text[at:]]) == ("", calls), text[:at]


@pytest.mark.parametrize("form", [form for form in CALLS if form != SINGLE])
def test_content_before_calls_is_text(form: str) -> None:
    text, calls = read(form, list(written(form, TWO, "I look < it [up].")))
    assert (text.rstrip(), calls) == ("I look < it [up].", TWO)


@pytest.mark.parametrize("form", CALLS)
def test_other_texts_are_shown_as_they_are(form: str) -> None:
    call = written(form, [("get", ROUGH)]).lstrip()
    marker = syntax(form).marker
    for text in ("Hello", "", f"a {marker}", f"{marker}?", call.replace("get", "nosuch", 1), call[: len(marker) + 3]):
        if text.strip() and text != marker:
            assert read(form, [text], patient=True) == (text, [])
            assert read(form, list(text), patient=True) == (text, [])


@pytest.mark.parametrize("form", ["xml", "pairs", "attributes", "tree"])
def test_a_value_may_hold_the_mark_that_ends_it(form: str) -> None:
    """What follows the mark tells whether it ends the value."""
    own = syntax(form).arguments
    assert own is not None
    mark = own.after_text.replace("\ue003", "place").strip()
    calls = [("get", {"place": f"a{mark}b {mark} c", "days": 1})]
    text = written(form, calls)
    assert read(form, [text]) == ("", calls)
    assert read(form, list(text)) == ("", calls)


@pytest.mark.parametrize("form", ["xml", "pairs", "wrapped"])
def test_the_schema_says_what_an_unquoted_value_is(form: str) -> None:
    """Without one, what is JSON is its value."""
    text = written(form, [("get", {"place": "5", "days": 5})])
    assert read(form, [text])[1] == [("get", {"place": "5", "days": 5})]
    parser = SyntaxParser(syntax(form), ["get"])
    calls = merged([*parser.feed(text).calls, *parser.finish().calls])
    assert json.loads(calls[0].arguments) == {"place": 5, "days": 5}


def test_long_strings_are_shown_as_they_arrive() -> None:
    parser = SyntaxParser(syntax("xml"), SCHEMAS)
    begun = written("xml", [("get", {"place": "Once upon a time", "days": 1})]).partition("a time")[0]
    shown = "".join(delta.arguments for delta in parser.feed(begun).calls)
    assert shown.startswith('{"place": "Once up')
    assert "".join(delta.arguments for delta in parser.feed("more and more").calls) == "more and more"


def test_a_call_that_is_cut_keeps_what_there_is() -> None:
    parser = SyntaxParser(syntax("xml"), SCHEMAS)
    text = written("xml", [("get", {"place": "Oslo", "days": 1})])
    found = [parser.feed(text[: text.index("lo\n")]), parser.finish()]
    assert "".join(each.text for each in found) == ""
    (call,) = merged([delta for each in found for delta in each.calls])
    assert (call.name, call.arguments) == ("get", '{"place": "Os')


@pytest.mark.parametrize("form", ["xml", "pairs", "attributes", "wrapped", "tree"])
def test_a_string_that_is_cut_within_its_end_holds_no_mark(form: str) -> None:
    """A bound on tokens left `Rome</parame` in the arguments."""
    text = written(form, [("get", {"place": "Rome"})])
    for at in range(text.index("Rome") + 1, len(text)):
        parser = SyntaxParser(syntax(form), SCHEMAS)
        deltas = merged([*parser.feed(text[:at]).calls, *parser.finish().calls])
        shown = "".join(delta.arguments for delta in deltas)
        assert '{"place": "Rome"}'.startswith(shown), text[:at]
        assert shown.startswith('{"place": "R'), text[:at]


def test_blanks_may_differ() -> None:
    for form, text in (
        ("objects", '<tool_call>{"arguments":{"days":1},"name":"get"}</tool_call>'),
        ("listed", '<|calls|>[{"tool":"get","parameters":{"days":1}}]<|called|>'),
        ("xml", "<tool_call><function=get><parameter=days>1</parameter></function></tool_call>"),
        ("pairs", "<tool_call>get<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"),
        (
            "attributes",
            '<calls><invoke name="get"><parameter name="days" string="false">1</parameter></invoke></calls>',
        ),
        ("python", "<|calls|>[ get( days = 1 ) ]<|called|>"),
    ):
        assert read(form, [text]) == ("", [("get", {"days": 1})])


def test_a_syntax_that_does_not_read_its_own_calls_is_not_used() -> None:
    """This template drops spaces, so that no reader can find the arguments again."""
    source = template("xml").source.replace("{{ v if v is string", "{{ v | replace(' ', '') if v is string")
    found = ChatTemplate(source, {}).derived
    assert (found.calls, found.shows_calls) == (None, True)


def test_a_template_without_tools_keeps_its_own_calls() -> None:
    """The prompt describes the tools in that syntax; calls and results are the template's."""
    text = replace(demo_text(), template=ChatTemplate(UNTOLD, {"eos_token": "<|end|>"}))
    dialect = text.dialect
    assert dialect is not None
    assert (dialect.own, dialect.is_led, dialect.syntax) == (False, False, syntax("numbered"))
    tools = [{"type": "function", "function": {"name": "get", "parameters": SCHEMAS["get"]}}]
    function = {"name": "get", "arguments": '{"days": 3}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    prompt = text.render(messages, tools=tools)
    assert "### get" in prompt
    assert "<|section|><|call|>functions.NAME:0<|with|>{…}<|call_end|><|section_end|>" in prompt
    assert prompt.partition("<|user|>")[2] == text.render(messages).partition("<|user|>")[2]
    assert '<|call|>functions.get:0<|with|>{"days": 3}<|call_end|>' in prompt
    assert "<|tool|>sunny" in prompt


def test_a_reminder_behind_the_user_does_not_hide_where_answers_begin() -> None:
    """Command-R+'s template ends each prompt with one, and its answers begin with words instead of a mark."""
    source = (
        TREE
        + HEAD
        + (
            "{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}\nAction:\n```json\n["
            + EACH
            + '{{ ", " if not loop.first }}{"tool": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
            "{% endfor %}]```{% endif %}<|end|>{% endfor %}<|turn|><|system|>Write Action: and a list.<|end|>"
            "{% if add_generation_prompt %}<|turn|><|assistant|>{% endif %}"
        )
    )
    found = ChatTemplate(source, {"eos_token": "<|end|>"}).derived.calls
    assert found is not None
    assert found.opening.startswith("Action:")


@pytest.mark.parametrize("form", CALLS)
def test_malformed_calls_are_the_same_at_every_cut(form: str) -> None:
    """They are text, or the calls that are still there; an answer that the model ended has no open call."""
    text = written(form, [("get", {"place": "Oslo", "days": 7})]).lstrip()
    for at in range(len(text) // 2, len(text) - 1, 3):
        for broken in (text[:at], text[:at] + text[at + 2 :], text[:at] + '"' + text[at:]):
            whole = read(form, [broken], patient=True, is_whole=True)
            assert whole[1] or whole[0] == broken
            for cut in range(1, len(broken)):
                assert read(form, [broken[:cut], broken[cut:]], patient=True, is_whole=True) == whole, broken


def test_an_answer_that_ends_in_mid_call_is_text_and_one_that_is_cut_a_call() -> None:
    text = written("xml", [("get", {"place": "Oslo"})]).lstrip().partition("lo\n")[0]
    assert read("xml", [text], patient=True, is_whole=True) == (text, [])
    parser = SyntaxParser(syntax("xml"), SCHEMAS, patient=True)
    (call,) = merged([*parser.feed(text).calls, *parser.finish().calls])
    assert (call.name, call.arguments) == ("get", '{"place": "Os')


def test_a_template_that_hides_calls_reveals_nothing() -> None:
    found = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", {}).derived
    assert (found.calls, found.shows_calls, found.thinking) == (None, False, None)


def test_a_template_that_writes_without_end_is_given_up() -> None:
    source = template("xml").source.replace(
        "<tool_call>", "{% for i in range(20000) %}{{ '{' }}{% endfor %}<tool_call>"
    )
    assert ChatTemplate(source, {}).derived.calls is None


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "place": st.text(),
        "days": st.integers(-10000, 10000),
        "deep": st.booleans(),
        "tags": st.lists(st.text(min_size=1), min_size=1, max_size=3),
        "where": st.fixed_dictionaries({"a": st.text(min_size=1), "b": st.integers(0, 9999)}),
    },
)


@pytest.mark.parametrize("form", CALLS)
@given(values=VALUES, data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_call_is_read_back(form: str, values: dict[str, Any], data: st.DataObject) -> None:
    text = written(form, [("get", values)])
    at = data.draw(st.integers(0, len(text)))
    assert read(form, [text[:at], text[at:]]) == ("", [("get", values)])
