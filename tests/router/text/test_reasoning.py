from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.text.parsers.families import REASONING
from kvferry.router.text.parsers.reasoning import ReasoningParser


def read(family: str, pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    """Reasoning and text."""
    parser = ReasoningParser(REASONING[family], opened=opened)
    found = [*map(parser.feed, pieces), parser.finish()]
    assert not any(each.calls for each in found)
    return "".join(each.reasoning for each in found), "".join(each.text for each in found)


@pytest.mark.parametrize(
    ("family", "opened", "text", "expected"),
    [
        ("qwen3", False, "<think>\nHm. So.\n</think>\n\nFour.\n", ("Hm. So.", "Four.\n")),
        ("qwen3", False, "Four.", ("", "Four.")),
        ("qwen3", False, "  Four <think>.", ("", "  Four <think>.")),
        ("qwen3", False, "<think>\n\n</think>\n\nFour.", ("", "Four.")),
        ("qwen3", True, "Hm. So.\n</think>\n\nFour.", ("Hm. So.", "Four.")),
        ("qwen3", True, "<think>Hm.</think>Four.", ("Hm.", "Four.")),
        ("qwen3", True, "Hm. a < b", ("Hm. a < b", "")),
        ("qwen3", False, "<think>Hm.</thin", ("Hm.</thin", "")),
        ("deepseek_r1", True, "Hm.\n\nSo.\n</think>\nFour </think>.", ("Hm.\n\nSo.", "Four </think>.")),
        ("granite", False, "Here is my thought process: Hm.\n\nHere is my response: 4", ("Hm.", "4")),
        ("granite", False, "Here's my thought process: Hm. Here's my response: 4", ("Hm.", "4")),
        ("mistral", False, "[THINK]Hm.[/THINK]4", ("Hm.", "4")),
    ],
)
def test_reasoning_is_told_from_the_answer(family: str, opened: bool, text: str, expected: tuple[str, str]) -> None:
    assert read(family, [text], opened=opened) == expected
    assert read(family, list(text), opened=opened) == expected


def test_the_prompt_tells_whether_the_output_begins_within_it() -> None:
    qwen, deepseek = REASONING["qwen3"], REASONING["deepseek_r1"]
    assert qwen.opened_by("<|im_start|>assistant\n<think>\n")
    assert not qwen.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not qwen.opened_by("<|im_start|>assistant\n")
    assert deepseek.opened_by("<|Assistant|>")
    assert not deepseek.opened_by("<|Assistant|></think>\n")


PARTS = st.sampled_from(
    ["<think>", "</think>", "<th", "</", " ", "\n", "a", "[THINK]", "[/THINK]", "Here is my response:"]
)


@pytest.mark.parametrize("family", REASONING)
@given(
    text=st.lists(st.one_of(PARTS, st.text(max_size=2)), max_size=9).map("".join), data=st.data(), opened=st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_no_cut_changes_what_is_read(family: str, text: str, data: st.DataObject, opened: bool) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = read(family, [text], opened=opened)
    assert read(family, [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])], opened=opened) == whole
