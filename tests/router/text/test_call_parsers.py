from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.families import CALLS
from kvferry.router.text.parsers.hermes import LedHermesParser
from kvferry.router.text.parsers.output_parser import merged

PARSERS: dict[str, type[CallParser]] = {**CALLS, "led": LedHermesParser}
NAMES = ("get", "put-it")
Result = tuple[str, list[tuple[str, str]]]


def read(family: str, pieces: list[str], *, patient: bool = False) -> Result:
    """All text, and name and arguments of each call; checks ids and indices on the way."""
    parser = PARSERS[family](NAMES, patient=patient)
    found = [*map(parser.feed, pieces), parser.finish()]
    deltas = [delta for each in found for delta in each.calls]
    for each in found:
        assert len({delta.index for delta in each.calls}) == len(each.calls)
    for index, group in itertools.groupby(deltas, key=lambda delta: delta.index):
        first, *rest = group
        assert first.id
        assert first.name
        assert not any(delta.id or delta.name for delta in rest)
        assert index <= max(delta.index for delta in deltas)
    calls = merged(deltas)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(each.text for each in found), [(call.name, call.arguments) for call in calls]


GET = ("get", '{"x": 1}')
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>', "", [GET]),
    ("hermes", 'Hi.\n<tool_call>{"name":"get","arguments":{"x": 1}}</tool_call>\n', "Hi.\n", [GET]),
    ("hermes", '\n\n<tool_call>{"arguments": {"x": 1}, "name": "get"}</tool_call>', "", [GET]),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [GET]),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [("get", "{}")]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"x": "</tool_call>}\\""}}</tool_call>', "",
     [("get", '{"x": "</tool_call>}\\""}')]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "put-it"}'
     "</tool_call>\nDone.", "\nDone.", [GET, ("put-it", "{}")]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"x": 1}}', "", [GET]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"x": 1', "", [("get", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "nosuch", "arguments": {}}</tool_call>', None, []),  # type: ignore[list-item]
    ("hermes", "<tool_call>get(x=1)</tool_call> and so on", None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call><tool_call>{"name": "get", "arguments": {"x": 1}}</tool_call>', "<tool_call>", [GET]),
    ("hermes", "a <tool_cal", None, []),  # type: ignore[list-item]
    ("led", "<text>It is 4.</text>", "It is 4.", []),
    ("led", '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>', "", [GET]),
    ("led", "Plain <text> here", None, []),  # type: ignore[list-item]
    ("llama3_json", '{"name": "get", "parameters": {"x": 1}}', "", [GET]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "get", "parameters": {"x": 1}}', "", [GET]),
    ("llama3_json", '{"name": "get", "parameters": {"x": 1}}; {"name": "put-it", "parameters": {}}', "",
     [GET, ("put-it", "{}")]),
    ("llama3_json", '{"name": "Ada", "born": 1815}', None, []),  # type: ignore[list-item]
    ("llama3_json", 'So: {"name": "get", "parameters": {}}', None, []),  # type: ignore[list-item]
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {"x": 1}}, {"name": "put-it", "arguments": {}}]', "",
     [GET, ("put-it", "{}")]),
    ("mistral", '[TOOL_CALLS]get[ARGS]{"x": 1}[TOOL_CALLS]put-it[ARGS]{}', "", [GET, ("put-it", "{}")]),
    ("mistral", '[TOOL_CALLS]get[CALL_ID]Ab3[ARGS]{"x": 1}', "", [GET]),
    ("mistral", 'Yes.[TOOL_CALLS]get{"x": 1}', "Yes.", [GET]),
    ("mistral", '[TOOL_CALLS]nosuch[ARGS]{"x": 1}', None, []),  # type: ignore[list-item]
    ("mistral", "[TOOL_CALLS] and nothing", None, []),  # type: ignore[list-item]
    ("pythonic", "[get(x=1), put-it(a=[1, -2.5, 'b)'], c={\"d\": None}, e=True, f=false)]", "",
     [GET, ("put-it", '{"a": [1, -2.5, "b)"], "c": {"d": null}, "e": true, "f": false}')]),
    ("pythonic", "<|python_start|>[get(x=1)]<|python_end|>", "", [GET]),
    ("pythonic", "[1, 2]", None, []),  # type: ignore[list-item]
    ("pythonic", "[get(1)]", None, []),  # type: ignore[list-item]
    ("pythonic", "[get(x=open('f'))]", None, []),  # type: ignore[list-item]
    ("pythonic", "[get(x=1e999)]", None, []),  # type: ignore[list-item]
    ("pythonic", f"[get(x={'(' * 500})]", None, []),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES)
def test_what_models_write(family: str, text: str, shown: str | None, calls: list[tuple[str, str]]) -> None:
    expected = (text if shown is None else shown, calls)
    assert read(family, [text]) == expected
    assert read(family, list(text)) == expected
    assert read(family, [text], patient=True) == expected


@pytest.mark.parametrize("family", ["hermes", "led", "llama3_json", "mistral"])
def test_arguments_come_as_they_are_written(family: str) -> None:
    """Not pythonic ones: they are JSON only once they are whole."""
    call = {"llama3_json": '{"name": "get", "parameters": ', "mistral": "[TOOL_CALLS]get[ARGS]"}
    parser = PARSERS[family](NAMES)
    head = parser.feed(call.get(family, '<tool_call>\n{"name": "get", "arguments": ') + "{")
    assert [(delta.name, delta.arguments) for delta in head.calls] == [("get", "{")]
    for part in ('"x"', ': "lo', 'ng"'):
        assert [delta.arguments for delta in parser.feed(part).calls] == [part]


def test_a_patient_parser_shows_a_malformed_call_as_text() -> None:
    text = 'See: <tool_call>{"name": "get", "arguments": {"x": tru}}</tool_call>'
    assert read("hermes", [text], patient=True) == (text, [])
    text = '<tool_call>{"name": "get", "arguments": {"x": 1}, oops</tool_call>'
    assert read("hermes", [text], patient=True) == (text, [])
    text = '[TOOL_CALLS]get[ARGS]{"x" 1}'
    assert read("mistral", [text], patient=True) == (text, [])


def test_ids_are_as_the_families_templates_want_them() -> None:
    def first_id(family: str, text: str) -> str:
        return PARSERS[family](NAMES).feed(text).calls[0].id

    assert first_id("hermes", '<tool_call>{"name": "get", "arguments": {}}').startswith("call_")
    mistral = first_id("mistral", "[TOOL_CALLS]get[ARGS]{}")
    assert len(mistral) == 9
    assert mistral.isalnum()


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<text>", "</text>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", "(",
        ")", '"', "'", "\\", ",", ";", ":", "=", " ", "\n", '"name"', '"get"', "get", '{"name": "get", "arguments": ',
        '{"name": "get", "parameters": ', '{"x": 1}', "get(x=1)", "<|python_tag|>", "<|python_start|>",
        "<|python_end|>", "null", "1", "é👩", "text",
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=12).map("".join)


@pytest.mark.parametrize("family", PARSERS)
@given(text=TEXTS, data=st.data(), patient=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_cut_changes_what_is_read(family: str, text: str, data: st.DataObject, patient: bool) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    bounds = [0, *places, len(text)]
    whole = read(family, [text], patient=patient)
    assert read(family, [text[a:b] for a, b in itertools.pairwise(bounds)], patient=patient) == whole
    if not whole[1] and family != "led":
        assert whole[0] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 2]), ascii=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_arguments_come_through(arguments: dict[str, Any], indent: int | None, ascii: bool) -> None:
    spelled = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    for family, text in (
        ("hermes", f'<tool_call>\n{{"name": "get", "arguments": {spelled}}}\n</tool_call>'),
        ("llama3_json", f'{{"name": "get", "parameters": {spelled}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "get", "arguments": {spelled}}}]'),
        ("mistral", f"[TOOL_CALLS]get[ARGS]{spelled}"),
    ):
        assert read(family, list(text)) == ("", [("get", spelled)])


@given(arguments=st.dictionaries(st.from_regex(r"[a-z]{1,5}x", fullmatch=True), JSON, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_keyword_arguments_come_through(arguments: dict[str, Any]) -> None:
    text = f"[get({', '.join(f'{name}={value!r}' for name, value in arguments.items())})]"
    shown, ((name, found),) = read("pythonic", [text])
    assert (shown, name, json.loads(found)) == ("", "get", arguments)


def test_hostile_text_costs_no_more_than_its_length() -> None:
    """Twice the text takes about twice the time, also where every piece may begin a call."""
    for family, part in (("hermes", '<tool_call>{"x":['), ("mistral", "[TOOL_CALLS][[{"), ("pythonic", "[get(x=[")):
        assert read(family, [part] * 4000)[0] == part * 4000
