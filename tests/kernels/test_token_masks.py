"""Bit masks: only what is set stays, and each row of the operations table draws as if the rest were minus infinity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.ops import Ops
from kvferry.kernels.sampling import NO_TOKEN, NoiseKeys
from kvferry.kernels.token_masks import keep_only
from kvferry.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [n, vocab] as int32 [n, words]; what lies behind the vocabulary is set."""
    padded = np.ones((len(allowed), (allowed.shape[1] + 31) // 32 * 32), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab", [40, 64, 1000])
def test_what_is_not_in_the_mask_becomes_minus_infinity(vocab: int) -> None:
    chance = np.random.default_rng(vocab)
    logits = torch.from_numpy(chance.normal(size=(4, vocab)).astype(np.float32))
    logits[1, 3] = torch.nan
    allowed = chance.random((2, vocab)) < 0.3
    allowed[0, 3] = False
    before = logits.clone()
    first, second = packed(allowed)
    keep_only(logits, [None, first, None, second])
    for row, some in ((1, allowed[0]), (3, allowed[1])):
        assert torch.equal(logits[row][some], before[row][some])
        assert (logits[row][~some] == -torch.inf).all()
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_all_rows_at_once_and_none() -> None:
    logits = torch.zeros(2, 64)
    keep_only(logits, [np.array([1, 0], dtype=np.int32), np.array([0, -(2**31)], dtype=np.int32)])
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[0], [63]]
    for none in ((), (None, None)):
        untouched = torch.zeros(2, 64)
        keep_only(untouched, none)
        assert untouched.isfinite().all()


@given(
    vocab=st.sampled_from([1, 5, 16, 31, 32, 33, 63, 64, 65, 100, 1000, 5003]),
    share=st.sampled_from([0.0, 0.002, 0.1, 0.5, 0.98, 1.0]),
    runs=st.booleans(),
    params=st.sampled_from(
        [
            GREEDY,
            SamplingParams(),
            SamplingParams(temperature=0.3),
            SamplingParams(top_k=3),
            SamplingParams(top_p=0.7),
            SamplingParams(min_p=0.1, top_k=40, top_p=0.9),
        ]
    ),
    bad=st.sampled_from([None, math.nan, math.inf]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_a_masked_row_draws_as_if_the_rest_were_minus_infinity(
    ops: Ops, vocab: int, share: float, runs: bool, params: SamplingParams, bad: float | None, seed: int
) -> None:
    """Whatever stands in the rest. runs: what is allowed lies in stretches of 20 tokens, like words of a mask."""
    chance = np.random.default_rng(seed)
    logits = torch.from_numpy(chance.normal(scale=4, size=(4, vocab)).astype(np.float32))
    choice = chance.random((4, (vocab + 19) // 20)) < share if runs else chance.random((4, vocab)) < share
    allowed = np.repeat(choice, 20, axis=1)[:, :vocab] if runs else choice
    if bad is not None:
        logits[torch.from_numpy(~allowed)] = bad
    allowed[3] = True
    logits[3] = logits[3].nan_to_num(0.0, 0.0)
    plain = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    keys = NoiseKeys((seed,) * 4, (7, 8, 9, 10))
    got = ops.draw(logits, [params] * 4, keys, [*packed(allowed)[:3], None]).tolist()
    assert got == ops.draw(plain, [params] * 4, keys).tolist()
    assert all(token == NO_TOKEN or allowed[row, token] for row, token in enumerate(got))
    assert [token == NO_TOKEN for token in got] == [not some.any() for some in allowed]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_counts_where_it_is_allowed(ops: Ops, params: SamplingParams, bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[:, 70] = bad
    allowed = np.ones((2, 100), dtype=bool)
    allowed[1, 70] = False
    got = ops.draw(logits, [params] * 2, NoiseKeys((1, 2), (3, 4)), [*packed(allowed)]).tolist()
    assert got[0] == NO_TOKEN
    assert got[1] not in (NO_TOKEN, 70)


def test_greedy_and_random_rows_share_a_batch(ops: Ops) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3))
    logits[0, [250, 40]] = 9.0
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(top_k=5), SamplingParams(), GREEDY]
    keys = NoiseKeys(tuple(range(6)), tuple(range(6)))
    allowed = np.random.default_rng(3).random((6, 300)) < 0.4
    masks = [None, None, *packed(allowed)[2:]]
    together = ops.draw(logits.clone(), params, keys, masks).tolist()
    alone = [ops.draw(logits[[i]].clone(), [params[i]], keys.pick([i]), [masks[i]]).item() for i in range(6)]
    assert together == alone
    assert together[0] == 40
