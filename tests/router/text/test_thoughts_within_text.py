"""Reasoning between an answer's text and a call is reasoning; marks that the text quotes stay text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.sampling import SamplingParams
from kvferry.router.dispatch.interface import Output
from kvferry.router.text.parsers.families import CALLS as FAMILIES
from kvferry.router.text.parsers.held_thought import MAX_CHARS, MAX_GAP
from kvferry.router.text.parsers.output_parser import CallParsing, OutputParser, Parsing
from kvferry.router.text.transcript import TextOptions, Transcript
from tests.api_parts import demo_text, ids_of
from tests.router.text.derived.small_templates import CALLS as FORMS
from tests.router.text.derived.small_templates import SCHEMAS, syntax
from tests.router.text.test_calls_in_streams import call_of
from tests.router.text.test_interleaved_reasoning import THINK, parts, turn_of
from tests.router.text.test_tool_grammars import CALL, accepts, begins
from tests.router.text.test_tool_grammars import written as grammar_of

DIALECTS = ["hermes", "mistral", "mistral 2", *(form for form in FORMS if syntax(form).is_marked)]
HERMES = call_of("hermes")


def cuts(data: st.DataObject, text: str) -> list[str]:
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_reasoning_between_text_and_a_call_is_reasoning_at_any_cut(dialect: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from(["", "<think>First.</think>\n\n"]))
    said = data.draw(st.sampled_from(["I look.\n\n", "I look. ", "Quoting <think>a</think>, I look.\n"]))
    thought = data.draw(st.sampled_from(["Hm. So.", 'Call {"name": "get"} or <tool_call>?', "a < b\n\nc", "é👩"]))
    gap = data.draw(st.sampled_from(["", "\n", "\n\n", " "]))
    text = f"{first}{said}<think>\n{thought}\n</think>{gap}{call_of(dialect)}"
    whole = parts(turn_of(dialect), [text])
    assert whole[:-1] == [
        *([("reasoning", "First.")] if first else []), ("text", said), ("reasoning", thought),
    ]  # fmt: skip
    assert whole[-1][0] == "call 0"
    for patient, pieces in itertools.product((False, True), (cuts(data, text), [*text])):
        assert parts(turn_of(dialect, patient=patient), pieces) == whole


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_marks_that_no_call_follows_are_text_at_any_cut(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from(
            [
                "I look.\n<think>Hm.</think>\nDone.",
                "I look.\n<think>Hm.</think>\n",
                "I look.\n<think>Hm.</think>\n<tool_ca",
                "I look.\n<think>Hm.",
                "I look.\n<thi",
                "Write <think> and </think>, " * 3,
                "<think>a <think>b</think> c</think> d",
                f"I look.\n<think>Is it {HERMES}?</think> Done.",
            ]
        )
    )
    turn = turn_of("hermes")
    turn.feed("Well: ")
    for pieces in ([text], [*text], cuts(data, text)):
        assert parts(turn_of("hermes"), ["Well: ", *pieces]) == [("text", f"Well: {text}")]


def test_a_call_in_reasoning_that_does_not_end_is_a_call() -> None:
    text = f"I look.\n<think>Hm. {HERMES}"
    for pieces in ([text], [*text]):
        shown = parts(turn_of("hermes"), pieces)
        assert [kind for kind, _ in shown] == ["text", "call 0"]
        assert shown[0][1] == "I look.\n<think>Hm. "


def test_several_thoughts_within_text_are_separate() -> None:
    text = f"A.\n<think>b</think>\n{HERMES}\n<think>c</think>\nD.\n<think>e</think>{HERMES}"
    for pieces in ([text], [*text]):
        shown = [(kind, said) for kind, said in parts(turn_of("hermes"), pieces) if not kind.startswith("call")]
        assert shown == [("text", "A.\n"), ("reasoning", "b"), ("reasoning", "c"), ("text", "D.\n"), ("reasoning", "e")]


def test_long_text_behind_a_mark_is_shown_as_it_comes() -> None:
    turn = turn_of("hermes")
    turn.feed("Well: <think>")
    assert "".join(each.text for each in turn.feed("x" * 100)) == ""
    shown = "".join(each.text for each in turn.feed("x" * MAX_CHARS))
    assert len(shown) == MAX_CHARS + 100 + len("<think>")
    assert "".join(each.text for each in turn.feed("y")) == "y"


def test_blanks_behind_reasoning_are_held_for_a_call_but_not_for_ever() -> None:
    turn = turn_of("hermes")
    turn.feed("Well: <think>a</think>")
    assert "".join(each.text for each in turn.feed("\n" * MAX_GAP)) == ""
    shown = "".join(each.text for each in turn.feed("\n"))
    assert shown == "<think>a</think>" + "\n" * (MAX_GAP + 1)


def stage_of() -> OutputParser:
    parsing = Parsing(THINK, CallParsing(FAMILIES["hermes"], SCHEMAS, patient=True))
    options, params = TextOptions(), SamplingParams()
    tokenizer = demo_text().tokenizer
    return OutputParser(Transcript(tokenizer, [1], params, options), parsing, parsing.reader(tokenizer, [1]))


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_tokens_of_reasoning_within_text_are_counted(per_output: int) -> None:
    thought = "<think>I think about it for a while.</think>"

    def counted(*texts: str) -> int:
        ids, stage = [each for text in texts for each in ids_of(text)], stage_of()
        for at in range(0, len(ids), per_output):
            stage.add(Output(tuple(ids[at : at + per_output])))
        return stage.reasoning_tokens

    assert counted("Well.\n", thought, f"\n{HERMES}") == counted(thought, "Done.") > 8
    assert counted("Well.\n", thought, "\nDone.") == 0


@pytest.mark.parametrize("marked", [False, True])
def test_grammars_allow_reasoning_between_text_and_a_call(marked: bool) -> None:
    source = grammar_of("hermes", marked=marked, thinking=THINK)
    text = f"I look.\n<think>Hm.</think>\n{CALL['hermes']}"
    assert accepts(source, text, marked=marked)
    assert accepts(source, f"<think>So.</think>\n\n{text}", marked=marked)
    assert accepts(source, text.replace("Hm.</think>\n", "Hm.</think>\nSo:\n"), marked=marked)
    assert not begins(source, "I look.\n<think>Hm.</think>\n<tool_call>\nno", marked=True) or not marked
