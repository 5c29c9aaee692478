"""Calls in streams: one that a grammar bounds is shown as it comes; any other is whole first, or text if malformed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.dispatch.interface import Output
from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.families import CALLS as FAMILIES
from kvferry.router.text.parsers.families import MARKERS_OF
from kvferry.router.text.parsers.hermes import LedHermesParser
from kvferry.router.text.parsers.output_parser import CallParsing, OutputParser, Parsing, merged
from kvferry.router.text.transcript import TextOptions, Transcript
from tests.api_parts import demo_text
from tests.router.text.derived.small_templates import CALLS as FORMS
from tests.router.text.derived.small_templates import SCHEMAS, SINGLE, syntax, written

HERMES = '<tool_call>\n{"name": "get", "arguments": {"place": "São \\"X\\"\\n{1}", "days": 7}}\n</tool_call>'
BY_HAND: Mapping[str, tuple[type[CallParser], str]] = {
    "hermes": (FAMILIES["hermes"], HERMES),
    "led": (LedHermesParser, HERMES),
    "llama3_json": (
        FAMILIES["llama3_json"],
        '{"name": "get", "parameters": {"place": "São \\"X\\"\\n{1}", "days": 7}}',
    ),
    "mistral": (
        FAMILIES["mistral"],
        '[TOOL_CALLS] [{"name": "get", "arguments": {"place": "São \\"X\\"", "days": 7}}]',
    ),
    "mistral 2": (FAMILIES["mistral"], '[TOOL_CALLS]get[ARGS]{"place": "São \\"X\\"\\n{1}", "days": 7}'),
    "pythonic": (FAMILIES["pythonic"], "[get(place='São \"X\" (1)', days=7)]"),
}
BEFORE, AFTER = "Vorher. ", " Nachher."


def parser_of(dialect: str) -> Callable[..., CallParser]:
    if dialect in BY_HAND:
        return partial(BY_HAND[dialect][0], SCHEMAS)
    return partial(SyntaxParser, syntax(dialect), SCHEMAS)


def call_of(dialect: str) -> str:
    if dialect in BY_HAND:
        return BY_HAND[dialect][1]
    return written(dialect, [("get", {"place": 'São "X" {1}', "days": 7})]).lstrip()


def read(parser: CallParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    found = [*map(parser.feed, pieces), parser.finish(is_whole=True)]
    calls = merged([delta for each in found for delta in each.calls])
    return "".join(each.text for each in found), [(call.name, call.arguments) for call in calls]


DIALECTS = (*BY_HAND, *FORMS)


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_malformed_call_is_text_in_a_stream(dialect: str, data: st.DataObject) -> None:
    """At any cut, a text is what it is as a whole answer: nothing of it is lost, and nothing comes twice."""
    call = call_of(dialect)
    at = data.draw(st.integers(0, len(call)))
    size, more = (
        data.draw(st.integers(0, 6)),
        data.draw(st.sampled_from(["", "x", '"', "'", "}", "]", ")", "<", "\n", ":"])),
    )
    alone = dialect in ("llama3_json", "pythonic", SINGLE)
    text = ("" if alone else BEFORE) + call[:at] + more + call[at + size :] + AFTER
    whole = read(parser_of(dialect)(patient=True), [text])
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    for pieces in ([text[a:b] for a, b in itertools.pairwise(bounds)], list(text)):
        assert read(parser_of(dialect)(patient=True), pieces) == whole
    shown, calls = whole
    assert calls or shown == text
    assert "".join([shown, *(arguments for _, arguments in calls)]).count("Nachher.") == 1
    assert alone or shown.startswith(BEFORE)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_the_model_ended_in_the_middle_is_text_in_a_stream(dialect: str) -> None:
    call = call_of(dialect)
    for end in range(1, call.index("7")):
        assert read(parser_of(dialect)(patient=True), list(call[:end])) == (call[:end], []), end


@pytest.mark.parametrize("dialect", ["hermes", "mistral", "mistral 2", "objects", "numbered", "xml", "pairs"])
def test_a_call_that_a_grammar_bounds_is_shown_as_it_comes(dialect: str) -> None:
    call = call_of(dialect)
    begun = call[: call.index("São") + 3]
    for governed in (False, True):
        parser = parser_of(dialect)(patient=True)
        if governed:
            parser.expect_grammar(
                syntax(dialect).marker if dialect in FORMS else MARKERS_OF[dialect.split(maxsplit=1)[0]]
            )
        deltas = merged(parser.feed(begun).calls)
        assert [(delta.name, "São" in delta.arguments) for delta in deltas] == [("get", True)] * governed
        deltas += parser.feed(call[len(begun) :]).calls
        assert [delta.name for delta in merged(deltas)] == ["get"]


def test_a_mark_in_a_reply_of_a_led_model_is_bounded_by_nothing() -> None:
    parser = LedHermesParser(SCHEMAS, patient=True)
    parser.expect_grammar("<tool_call>")
    text = 'Write <tool_call>{"name": "get", "arguments": {"place": oops}}</tool_call>.'
    assert read(parser, ["<text>", *text]) == (text, [])


MARK = "<tool_call>"


def marked() -> TextTokenizer:
    own = Tokenizer.from_str(demo_text().tokenizer.library.to_str())
    own.add_special_tokens([AddedToken(MARK, normalized=False)])
    return TextTokenizer(own)


def stage_of(tokenizer: TextTokenizer, mark: int) -> OutputParser:
    calls = CallParsing(FAMILIES["hermes"], SCHEMAS, patient=True, marker=MARK, marker_id=mark)
    params = SamplingParams(max_tokens=500, eos_token_ids=(2,))
    options = replace(TextOptions(), shown={mark: MARK})
    parsing = Parsing(calls=calls)
    return OutputParser(Transcript(tokenizer, [1], params, options), parsing, parsing.reader(tokenizer, [1]))


@pytest.mark.parametrize("per_output", [1, 4, 500])
def test_only_the_token_of_a_mark_begins_what_a_grammar_bounds(per_output: int) -> None:
    """The letters of the mark are free text to a grammar; a call behind them may be malformed."""
    tokenizer = marked()
    mark, rest = tokenizer.library.token_to_id(MARK), '{"name": "get", "arguments": {"place": "Oslo'
    assert mark is not None

    def encoded(text: str) -> list[int]:
        return list(tokenizer.library.encode(text, add_special_tokens=False).ids)

    def shown(ids: list[int]) -> list[Any]:
        stage = stage_of(tokenizer, mark)
        outputs = [Output(tuple(ids[at : at + per_output])) for at in range(0, len(ids), per_output)]
        pieces = list(map(stage.add, outputs))
        pieces.append(stage.add(Output((2,), finish_reason="stop", stop_token=2)))
        text, calls = "".join(piece.text for piece in pieces), merged([call for each in pieces for call in each.calls])
        return [text, [call.arguments for call in calls]]

    letters = [each for part in ("<tool", "_call>") for each in encoded(part)]
    assert shown([*letters, *encoded(rest)]) == [MARK + rest, []]
    assert shown([mark, *encoded(rest)]) == ["", ['{"place": "Oslo']]
    spoiled = f'{rest}": 1}}}}'
    both = [*letters, *encoded(spoiled), mark, *encoded(rest)]
    assert shown(both) == [MARK + spoiled, ['{"place": "Oslo']]
