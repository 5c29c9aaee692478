"""How answers are compared."""

from __future__ import annotations

import math

import pytest

from benchmarks.accuracy import PROMPT_LEN, PROMPTS, PROSE, Answers, agreement, prompts_of, shared


def test_shared_beginning() -> None:
    assert shared([1, 2, 3], [1, 2, 4]) == 2
    assert shared([1, 2], [1, 2, 4]) == 2
    assert shared([], [1]) == 0


def test_agreement_and_perplexity() -> None:
    ours = Answers([-math.log(8), -math.log(2)], [1, 2], [[1, 2, 3], [4, 5, 6]])
    theirs = Answers([-1.0, -1.0], [1, 9], [[1, 2, 3], [4, 9, 6]])
    assert ours.perplexity == pytest.approx(4)
    assert agreement(ours, theirs) == (0.5, 2)


def test_prompts_come_from_all_over_the_text() -> None:
    prompts = prompts_of(range(1000))
    assert len(prompts) == PROMPTS
    assert {len(prompt) for prompt in prompts} == {PROMPT_LEN}
    assert prompts[0][0] == 0
    assert prompts[-1][-1] >= 1000 - PROMPTS
    assert len(PROSE.read_text().split()) > 768
