"""Reasoning behind calls: between two of them and before the answer, in every syntax whose calls have a mark."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.text.parsers.families import CALLS as FAMILIES
from kvferry.router.text.parsers.families import REASONING
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.parsers.reasoning import ReasoningParser, Thinking
from kvferry.router.text.parsers.turn_parser import TurnParser
from kvferry.router.text.transcript import Parsed
from tests.router.text.derived.small_templates import CALLS as FORMS
from tests.router.text.derived.small_templates import written
from tests.router.text.test_calls_in_streams import BY_HAND, call_of, parser_of
from tests.router.text.test_tool_grammars import CALL, TWO, accepts
from tests.router.text.test_tool_grammars import written as grammar_of

THINK = REASONING["qwen3"]
DIALECTS = ["hermes", "llama3_json", "mistral", "mistral 2", *FORMS]


def turn_of(dialect: str, *, patient: bool = True, opened: bool = False, thinking: Thinking = THINK) -> TurnParser:
    parser = parser_of(dialect)(patient=patient, thoughts=thinking.begins)
    return TurnParser(ReasoningParser(thinking, opened=opened), parser)


def parts(turn: TurnParser, pieces: list[str]) -> list[tuple[str, str]]:
    """Kinds and texts of the parts of an answer, in their order; a call is named by its number."""
    found: list[Parsed] = [each for piece in pieces for each in turn.feed(piece)] + turn.finish(is_whole=True)
    shown: list[tuple[str, str]] = []

    def say(kind: str, text: str) -> None:
        if shown and shown[-1][0] == kind:
            shown[-1] = (kind, shown[-1][1] + text)
        elif text:
            shown.append((kind, text))

    for each in found:
        say("reasoning", each.reasoning)
        say("text", each.text)
        for call in each.calls:
            say(f"call {call.index}", f"{call.name}{call.arguments}")
    return shown


def second(dialect: str) -> str:
    """A call that stands alone behind reasoning."""
    if dialect in BY_HAND:
        return call_of(dialect)
    return written(dialect, [("put-it", {"place": "<think>no</think>"})]).lstrip()


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_reasoning_behind_calls_is_reasoning_at_any_cut(dialect: str, data: st.DataObject) -> None:
    gap = data.draw(st.sampled_from(["", "\n", "\n\n", " "]))
    answer = data.draw(st.sampled_from(["", "Both <think> were asked.", "Done."]))
    thought = data.draw(st.sampled_from(["Hm. So.", 'Call {"name": "get"} or <tool_call>?', "a < b\n\nc", "é👩"]))
    text = f"<think>First.</think>{call_of(dialect)}{gap}<think>{thought}</think>{gap}{second(dialect)}"
    text += f"{gap}<think>Last.</think>{gap}{answer}" if answer else ""
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    whole = parts(turn_of(dialect), [text])
    assert [kind for kind, _ in whole] == [
        "reasoning", "call 0", "reasoning", "call 1", *(("reasoning", "text") if answer else ()),
    ]  # fmt: skip
    assert whole[2] == ("reasoning", thought)
    assert whole[4:] == ([("reasoning", "Last."), ("text", answer)] if answer else [])
    for patient, pieces in itertools.product(
        (False, True), ([text[a:b] for a, b in itertools.pairwise(bounds)], [*text])
    ):
        assert parts(turn_of(dialect, patient=patient), pieces) == whole


def test_an_answer_may_end_in_reasoning_behind_a_call() -> None:
    call = call_of("hermes")
    for text, last in (
        (f"{call}\n<think>Hm", [("reasoning", "Hm")]),
        (f"{call}\n<thi", [("text", "\n<thi")]),
        (f"{call}\n<think>Hm.</think>\n", [("reasoning", "Hm.")]),
        (f"{call}\n<think></think>\n", []),
        (f"{call[:-4]}", []),
    ):
        for pieces in ([text], list(text)):
            assert parts(turn_of("hermes"), pieces)[1:] == last, text


def test_marks_within_arguments_and_in_text_are_no_reasoning() -> None:
    text = written("xml", [("get", {"place": "a\n<think>b</think>"})]).lstrip() + "So <think>c</think>."
    shown = parts(turn_of("xml"), list(text))
    assert [kind for kind, _ in shown] == ["call 0", "text"]
    assert shown[1] == ("text", "So <think>c</think>.")


def test_a_turn_says_when_tokens_may_be_reasoning() -> None:
    """So they are counted one by one."""
    turn, call = turn_of("hermes"), call_of("hermes")
    turn.feed("Well. ")
    assert (turn.may_think, turn.thinks) == (True, False)
    turn.feed(call)
    assert (turn.may_think, turn.thinks) == (True, False)
    turn.feed("\n<think>Hm")
    assert turn.thinks


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_grammars_allow_reasoning_between_calls(family: str, marked: bool) -> None:
    one = "[TOOL_CALLS]now[ARGS]{}" if (family, marked) == ("mistral", True) else CALL[family]
    two = f"{one}[TOOL_CALLS]now[ARGS]{{}}" if one.endswith("[ARGS]{}") else TWO[family]
    options: dict[str, Any] = {"marked": marked, "thinking": THINK}
    text = f"{one}<think>Hm.</think>\n{two}"
    assert accepts(grammar_of(family, **options), f"<think>So.</think>\n\n{text}", marked=marked)
    assert accepts(grammar_of(family, forced=True, **options), text, marked=marked)
    assert not accepts(grammar_of(family, forced=True, parallel=False, **options), text, marked=marked)
    assert not accepts(grammar_of(family, forced=True, **options), f"{one}<think>Hm.</think>\n", marked=marked)
    turn = TurnParser(ReasoningParser(THINK, opened=False), FAMILIES[family](["add", "now"], thoughts=THINK.begins))
    found = [*turn.feed(text), *turn.finish()]
    assert len(merged([call for each in found for call in each.calls])) == 3
