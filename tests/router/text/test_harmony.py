"""gpt-oss's messages on channels: what its parser tells apart, wherever the output is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.text.parsers.harmony import MARKERS, MARKS, HarmonyParser
from kvferry.router.text.parsers.output_parser import merged
from tests.router.text.test_call_parsers import JSON

NAMES = ("get", "put-it")
ON = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"x": 1}'
GET = ("get", '{"x": 1}')
Result = tuple[str, str, list[tuple[str, str]]]


def marked(text: str) -> str:
    """As the transcript shows it: a character for each marker. What is spelled with a tilde is text."""
    for marker, mark in MARKS.items():
        text = text.replace(marker, mark)
    return text.replace("<~", "<|")


def read(
    pieces: list[str], *, names: tuple[str, ...] = NAMES, lead: str = "<|start|>assistant", **options: Any
) -> Result:
    """Reasoning, text, and name and arguments of each call; checks on the way that no mark is shown."""
    parser = HarmonyParser(NAMES, lead=marked(lead), **options)
    found = [each for piece in [*map(parser.feed, pieces), parser.finish()] for each in piece]
    calls = merged([delta for each in found for delta in each.calls])
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(call.id and call.name for call in calls)
    shown = [each.text for each in found], [each.reasoning for each in found], [call.arguments for call in calls]
    assert not set("".join(itertools.chain(*shown))) & set(MARKS.values())
    return "".join(shown[1]), "".join(shown[0]), [(call.name, call.arguments) for call in calls]


CASES: dict[str, tuple[str, Result]] = {
    "answer": ("<|channel|>final<|message|> Four.\n", ("", " Four.\n", [])),
    "thought": (f"<|channel|>analysis<|message|>Hm.{ON}<|channel|>final<|message|>4<|return|>", ("Hm.", "4", [])),
    "call": (f"<|channel|>analysis<|message|>Hm.{ON}{CALL}<|call|>", ("Hm.", "", [GET])),
    "without its end": (CALL, ("", "", [GET])),
    "recipient first": (' to=functions.get<|channel|>commentary json<|message|>{"x": 1}', ("", "", [GET])),
    "recipient first, constrained": (
        f"<|channel|>analysis<|message|>Hm.{ON} to=functions.get<|channel|>commentary <|constrain|>json"
        '<|message|>{"x": 1}',
        ("Hm.", "", [GET]),
    ),
    "on another channel": ('<|channel|>analysis to=functions.get code<|message|>{"x": 1}', ("", "", [GET])),
    "without a prefix": ('<|channel|>commentary to=get<|message|> {"x": 1}\n', ("", "", [GET])),
    "no arguments": ("<|channel|>commentary to=functions.put-it<|message|><|call|>", ("", "", [("put-it", "{}")])),
    "two calls": (
        f"{CALL}{ON}<|channel|>commentary to=functions.put-it<|message|>{{}}<|call|>",
        ("", "", [GET, ("put-it", "{}")]),
    ),
    "two calls, each ended": (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", ("", "", [GET, GET])),
    "preamble": (f"<|channel|>commentary<|message|>I look.{ON}{CALL}", ("", "I look.", [GET])),
    "messages of a kind": (
        f"<|channel|>analysis<|message|>A{ON}<|channel|>commentary<|message|>B{ON}<|channel|>analysis<|message|>C{ON}"
        "<|channel|>final<|message|>D",
        ("A\nC", "B\nD", []),
    ),
    "another's call": ('<|channel|>commentary to=functions.nosuch json<|message|>{"x": 1}', ("", '{"x": 1}', [])),
    "built-in tool": (f"<|channel|>analysis to=python code<|message|>1+1{ON}", ("1+1", "", [])),
    "marker as text in a string": (CALL.replace("1", '"<~end|> }"'), ("", "", [("get", '{"x": "<|end|> }"}')])),
    "marker as text": ("<|channel|>final<|message|><~end|><~call|>", ("", "<|end|><|call|>", [])),
    "text behind arguments": (f"{CALL} so", ("", "so", [GET])),
    "unknown channel": ("<|channel|>musing<|message|>Four.", ("", "Four.", [])),
    "no channel": ("<|message|>Four.", ("", "Four.", [])),
    "no message": ("<|channel|>final Four is it.<|return|>", ("", " Four is it.", [])),
    "nothing but text": (" Four is it.", ("", " Four is it.", [])),
    "text that begins as a head": (" to=x or to=y", ("", " to=x or to=y", [])),
    "no message, thought": (f"<|channel|>analysis Hm! So.{ON}<|channel|>final<|message|>4", (" Hm! So.", "4", [])),
    "no message, no channel": ("<|channel|>Four is it.", ("", "Four is it.", [])),
    "no end": ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>4", ("Hm.", "4", [])),
    "no end but a start": (
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>4", ("Hm.", "4", []),
    ),
    "text between messages": ("<|channel|>final<|message|>4<|end|> and 5", ("", "4\n and 5", [])),
    "another role": ("<|channel|>final<|message|>4<|end|><|start|>user<|message|>5", ("", "4\n5", [])),
    "message twice": ("<|channel|>final<|message|>4<|message|>5", ("", "45", [])),
    "channel twice": ("<|channel|>analysis<|channel|>final<|message|>4", ("", "4", [])),
    "head without end": ("<|channel|>final" + " " * 400 + "<|message|>4", ("", " " * 400 + "4", [])),
    "nothing": ("", ("", "", [])),
    "one word": ("to", ("", "to", [])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_models_write(name: str) -> None:
    text, expected = marked(CASES[name][0]), CASES[name][1]
    whole = read([text])
    assert whole == expected
    assert read(list(text)) == whole
    assert read([text], patient=True) == whole


@pytest.mark.parametrize("text", ["<|channel|>analysis<|message|>Hm.", f"<|channel|>commentary<|message|>I.{ON}{CALL}"])
def test_what_is_cut_shows_no_head(text: str) -> None:
    """After any token of it: a head is not shown, what came of a message is."""
    text = marked(text)
    for end in range(len(text)):
        for patient in (False, True):
            reasoning, said, calls = read([text[:end]], patient=patient)
            assert "Hm.".startswith(reasoning)
            assert "I.".startswith(said)
            assert all(name == "get" and (not said or said == "I.") for name, _ in calls)
            assert all('{"x": 1}'.startswith(arguments) or arguments == "{}" for _, arguments in calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = HarmonyParser(NAMES)
    head = parser.feed(marked(CALL[: CALL.index("{")]))
    assert [(delta.name, delta.arguments) for each in head for delta in each.calls] == [("get", "")]
    for part in ("{", '"x"', ': "lo', 'ng"'):
        assert [delta.arguments for each in parser.feed(part) for delta in each.calls] == [part]


def test_what_comes_together_keeps_its_order() -> None:
    text = marked(f"<|channel|>commentary<|message|>A{ON}<|channel|>analysis<|message|>B{ON}{CALL}{ON}<|message|>C")
    parser = HarmonyParser(NAMES)
    found = [*parser.feed(text), *parser.finish()]
    assert [each.text or each.reasoning or "call" for each in found] == ["A", "B", "call", "call", "\nC"]


def test_a_patient_parser_shows_a_malformed_call_as_text() -> None:
    for arguments in ('{"x": tru}', "x=1", "[1]"):
        text = marked(CALL.replace('{"x": 1}', arguments))
        assert read([text], patient=True) == ("", arguments, [])


def test_reasoning_is_text_where_it_is_not_looked_for() -> None:
    text = marked(f"<|channel|>analysis<|message|>Hm.{ON}<|channel|>final<|message|>4")
    assert read([text], thinks=False) == ("", "Hm.\n4", [])


def test_an_output_goes_on_where_its_prompt_ends() -> None:
    begun = "<|start|>assistant<|channel|>final<|message|>It is"
    assert read([" so."], lead=begun) == ("", " so.", [])
    assert read([marked(f"{ON}<|channel|>final<|message|>4")], lead=begun) == ("", "\n4", [])
    thinking = "<|start|>assistant<|channel|>analysis<|message|>Hm"
    assert read([marked(f".{ON}<|channel|>final<|message|>4")], lead=thinking) == (".", "4", [])
    assert read([marked("<|message|>4")], lead="<|start|>assistant<|channel|>final") == ("", "4", [])
    assert read(["4"], lead="") == ("", "4", [])


FRAGMENTS = st.sampled_from(
    [
        *MARKERS, "assistant", "user", "analysis", "commentary", "final", " to=functions.get", "to=functions.put-it",
        "to=", " ", "\n", "json", "{", "}", '{"x": 1}', '"', "\\", ",", "functions.", "get", "t", "an", "é👩", "text",
        CALL, ON,
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=12).map("".join).map(marked)


@given(text=TEXTS, data=st.data(), patient=st.booleans())
@settings(max_examples=400, deadline=None)
def test_no_cut_changes_what_is_read(text: str, data: st.DataObject, patient: bool) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    whole = read([text], patient=patient)
    assert read([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])], patient=patient) == whole
    assert read(list(text), patient=patient) == whole


@given(body=st.text(), channel=st.sampled_from(["analysis", "commentary", "final", "musing"]), patient=st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_text_of_a_message_comes_through(body: str, channel: str, patient: bool) -> None:
    text = marked(f"<|channel|>{channel}<|message|>") + body
    assert read([text], patient=patient)[channel != "analysis"] == body


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_an_output_without_marks_is_text(text: str) -> None:
    if text.strip() and not text.strip().startswith("to="):
        assert read(list(text)) == ("", text, [])


@given(arguments=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 2]), ascii=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_arguments_come_through(arguments: dict[str, Any], indent: int | None, ascii: bool) -> None:
    spelled = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    text = marked(CALL).replace('{"x": 1}', spelled)
    assert read(list(text)) == ("", "", [("get", spelled)])


def test_hostile_text_costs_no_more_than_its_length() -> None:
    for part in ("<|channel|>", "<|start|>assistant to=", "<|channel|>commentary to=functions.get<|message|>{"):
        read([marked(part)] * 4000)
