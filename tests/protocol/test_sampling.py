"""Bounds of sampling parameters: the error names the field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_LOGPROBS, SamplingParams

VOCAB = 100
GOOD = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [0, 10**6], [-1]),
        ("min_tokens", [0, 8], [-1, 9]),
        ("temperature", [0.0, 2.0], [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, math.nan]),
        ("top_k", [-1, 0, 10**6], [-2]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("repetition_penalty", [0.1, 5.0], [0.0, -1.0, math.nan, math.inf]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
        ("prompt_logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
        (
            "logit_bias",
            [((0, -100.0), (VOCAB - 1, 100.0))],
            [((VOCAB, 0.0),), ((-1, 0.0),), ((0, 100.1),), ((0, 1.0),) * 301],
        ),
        ("stop_token_ids", [(0, VOCAB - 1)], [(VOCAB,), (-1,)]),
    ],
)
def test_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        replace(GOOD, **{field: value}).validate(VOCAB)
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            replace(GOOD, **{field: value}).validate(VOCAB)
        assert caught.value.param == field
        assert field in caught.value.message


def test_the_message_tells_the_bound() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p must be greater than 0.0 and at most 1.0, got 0.0"):
        replace(GOOD, top_p=0.0).validate(VOCAB)


def test_defaults_are_valid() -> None:
    SamplingParams().validate(VOCAB)


@given(st.lists(st.integers(0, 99)).map(tuple), st.lists(st.integers(0, 99)).map(tuple))
def test_ignoring_eos_keeps_the_clients_own_stop_tokens(eos: tuple[int, ...], stop: tuple[int, ...]) -> None:
    params = SamplingParams(eos_token_ids=eos, stop_token_ids=stop)
    assert set(params.ending_token_ids) == set(eos) | set(stop)
    assert replace(params, ignore_eos=True).ending_token_ids == stop
