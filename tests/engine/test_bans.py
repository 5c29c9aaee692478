"""allowed_token_ids and bad_words: what may be drawn at all, by the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.logits_processors import edits_for
from kvferry.kernels.logit_adjustments import Adjustments
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from tests.toy import VOCAB, expected, make_engine, make_job

PROMPT = [1, 2, 3, 4, 5]
CPU = torch.device("cpu")


def run(*jobs: Job) -> list[int]:
    engine: Engine = make_engine()
    for job in jobs:
        engine.add(job)
    while engine.has_work():
        assert engine.step()
    engine.check_integrity()
    made = [t for e in engine.events if isinstance(e, Generated) for t in e.delta.token_ids]
    return made


def possible(params: SamplingParams, tokens: list[int], prompt_len: int, vocab: int = 12) -> set[int]:
    """Tokens that can be drawn."""
    logits = torch.zeros(vocab)
    for edit in edits_for(params, tokens, prompt_len, CPU):
        edit.apply(logits)
    Adjustments(params, tokens, prompt_len).apply(logits, len(tokens) - prompt_len)
    return set(torch.isfinite(logits).nonzero()[:, 0].tolist())


def ends_in(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return len(tokens) >= len(word) and list(tokens[len(tokens) - len(word) :]) == list(word)


def test_nothing_but_what_is_allowed_is_drawn_and_the_likeliest_of_it() -> None:
    allowed = (7, 90, 33)
    made = run(make_job("a", PROMPT, 12, allowed_token_ids=allowed))
    assert set(made) <= set(allowed)
    assert made[0] == 90, "the toy model likes greater ids"
    assert run(make_job("a", PROMPT, 12, allowed_token_ids=tuple(range(VOCAB)))) == expected(PROMPT, 12)


def test_allowed_ids_go_on_with_bias_and_penalties() -> None:
    made = run(make_job("a", PROMPT, 6, allowed_token_ids=(7, 8), logit_bias=((7, 50.0), (9, 100.0))))
    assert made == [7] * 6
    made = run(make_job("a", PROMPT, 20, allowed_token_ids=(7, 8), repetition_penalty=1.5, presence_penalty=1.0))
    assert set(made) == {7, 8}


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(words, st.lists(st.integers(0, 3), max_size=8), st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_a_bad_word_is_cut_off_at_its_last_token(
    bad: list[tuple[int, ...]], tokens: list[int], prompt_len: int
) -> None:
    prompt_len = min(prompt_len, len(tokens))
    found = possible(SamplingParams(bad_words=tuple(bad)), tokens, prompt_len, vocab=5)
    output = tokens[prompt_len:]
    assert found == {t for t in range(5) if not any(ends_in([*output, t], word) for word in bad)}


def test_the_prompt_s_end_is_no_part_of_a_bad_word() -> None:
    params = SamplingParams(bad_words=((5, 6), (9,)))
    assert possible(params, [4, 5], 2) == set(range(12)) - {9}
    assert possible(params, [4, 5], 1) == set(range(12)) - {9, 6}


def test_bad_words_are_kept_out_across_a_move_to_another_node() -> None:
    free = expected(PROMPT, 10)
    bad = ((free[0], free[1]), (free[3],))
    whole = run(make_job("a", PROMPT, 10, bad_words=bad))
    assert whole[0] == free[0]
    assert whole != free
    assert not any(ends_in(whole[: i + 1], word) for i in range(10) for word in bad)
    for cut in (1, 4, 9):
        job = make_job("a", PROMPT, 10, bad_words=bad)
        moved = replace(job, token_ids=(*PROMPT, *whole[:cut]), prompt_len=len(PROMPT), attempt=1)
        engine = make_engine()
        engine.add(moved)
        while engine.has_work():
            engine.step()
        made = [t for e in engine.events if isinstance(e, Generated) for t in e.delta.token_ids]
        assert whole[:cut] + made == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * 40_000}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,), (2,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "eos_token_ids": (3,), "min_tokens": 2}, "allowed_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"bad_words": ((1,),) * 300}, "bad_words"),
    ],
)
def test_bounds_are_told(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**fields).validate(VOCAB)
    assert raised.value.param == param


def test_what_is_within_the_bounds_passes() -> None:
    SamplingParams(allowed_token_ids=(1, 2), bad_words=((1,), (2, 1)), min_tokens=2, eos_token_ids=(1,)).validate(VOCAB)
