from __future__ import annotations

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.fill_in_middle import infill_marks
from tests.api_parts import demo_text
from tests.infill_parts import text_with

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")


@pytest.mark.parametrize("marks", [QWEN, STARCODER, DEEPSEEK, LLAMA])
def test_prefix_and_suffix_stand_in_the_family_s_tokens(marks: tuple[str, str, str]) -> None:
    text = text_with(*marks)
    prompt = infill_marks(text, "suffix").prompt("a ", " b")
    assert prompt == f"{marks[0]}a {marks[1]} b{marks[2]}"
    ids = text.encode(prompt, add_special_tokens=False)
    assert [ids.count(text.tokenizer.library.token_to_id(mark)) for mark in marks] == [1, 1, 1]


def test_codestral_s_suffix_comes_first_and_nothing_closes_the_prompt() -> None:
    assert infill_marks(text_with("[PREFIX]", "[SUFFIX]"), "suffix").prompt("a", "b") == "[SUFFIX]b[PREFIX]a"


def test_the_marks_and_the_family_s_ends_end_the_output() -> None:
    text = text_with(*QWEN, "<|fim_pad|>", "<|file_sep|>")
    spelled = {text.tokenizer.library.id_to_token(each) for each in infill_marks(text, "suffix").ends}
    assert {*QWEN, "<|fim_pad|>", "<|file_sep|>"} <= spelled


def test_other_files_come_before_in_the_family_s_tokens_or_as_they_are() -> None:
    files = [("a.py", "one\n"), ("b.py", "two\n")]
    known = infill_marks(text_with(*QWEN, "<|repo_name|>", "<|file_sep|>"), "suffix").prompt("p", "s", files)
    assert known.startswith(
        "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>filename\n<|fim_prefix|>p"
    )
    plain = infill_marks(text_with(*DEEPSEEK), "suffix").prompt("p", "s", files)
    assert plain.startswith("one\n\n\ntwo\n\n\n<｜fim▁begin｜>p")


def test_a_model_without_the_tokens_says_so_by_the_field() -> None:
    with pytest.raises(InvalidRequest, match="fill-in-the-middle tokens") as caught:
        infill_marks(demo_text(), "suffix")
    assert caught.value.param == "suffix"
