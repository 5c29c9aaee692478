"""Drawing by every row of the operations table that runs here: what min_p, top_k and top_p keep, at sizes where not the
whole vocabulary is looked at, and which of the kept tokens wins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.gumbel_noise import gumbel, random_bits
from kvferry.kernels.ops import Ops
from kvferry.kernels.sampling import NO_TOKEN, NoiseKeys, _kept
from kvferry.protocol.sampling import SamplingParams

VOCAB = 10_000
CLOSE = 1e-5
"""More than noise differs between implementations of the logarithm."""


def _oracle(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Scaled logits [vocab] with everything not kept at -inf; by full sorts in double precision."""
    x = (logits / p.temperature).double()
    x = x.masked_fill(x.softmax(-1) < p.min_p * x.softmax(-1).max(), -math.inf)
    if 0 < p.top_k < len(x):
        x = x.masked_fill(x < x.sort(descending=True).values[p.top_k - 1], -math.inf)
    if p.top_p < 1:
        probs, order = x.softmax(-1).sort(descending=True)
        least = x[order[probs.cumsum(-1) - probs < p.top_p]].min()
        x = x.masked_fill(x < least, -math.inf)
    return x


def _logits(scale: float, rows: int = 6, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(17)) * scale


def _expect_winners(ops: Ops, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys) -> None:
    got = ops.draw(logits.clone(), params, keys).tolist()
    noise = gumbel(keys.seeds, keys.positions, logits.shape[1], "cpu")
    for token, row, p, own in zip(got, logits, params, noise, strict=True):
        total = _oracle(row, p) + own
        assert total[token] >= total.max() - CLOSE * max(1.0, row[row.isfinite()].abs().max().item())


def _winners(ops: Ops, logits: torch.Tensor, params: SamplingParams) -> set[int]:
    rows = logits.expand(400, -1).clone()
    return set(ops.draw(rows, [params] * 400, NoiseKeys((3,) * 400, tuple(range(400)))).tolist())


@pytest.mark.parametrize("scale", [8.0, 3.0, 0.5])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=255),
        SamplingParams(top_k=256),
        SamplingParams(top_k=257),
        SamplingParams(top_k=5000),
        SamplingParams(top_k=VOCAB),
        SamplingParams(top_k=2**70),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_k=100, top_p=0.7),
        SamplingParams(top_k=4096, top_p=0.99),
        SamplingParams(min_p=0.05, top_k=400, top_p=0.9),
        SamplingParams(min_p=1.0),
        SamplingParams(),
    ],
    ids=str,
)
def test_the_winner_is_the_oracles(ops: Ops, scale: float, params: SamplingParams) -> None:
    logits = _logits(scale)
    keys = NoiseKeys((1, 2, 3, 4, 5, 6), (7,) * 6)
    got = ops.draw(logits.clone(), [params] * 6, keys)
    noise = gumbel(keys.seeds, keys.positions, VOCAB, "cpu")
    expected = torch.stack([_oracle(row, params) for row in logits]) + noise
    assert got.tolist() == expected.argmax(-1).tolist()


@given(
    vocab=st.sampled_from([1, 2, 5, 8, 16, 33, 63, 64, 65, 1000]),
    shape=st.sampled_from(["random", "flat", "peaked", "tied", "masked", "sorted", "wide"]),
    temperature=st.sampled_from([1.0, 0.2, 0.7, 1.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.04, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 999]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.913, 0.999]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_rows_of_any_shape(
    ops: Ops,
    vocab: int,
    shape: str,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=random) * 3
    if shape == "flat":
        logits = torch.full_like(logits, -2.5)
    elif shape == "peaked":
        logits[:, vocab // 2] += 30
    elif shape == "tied":
        logits = logits.round()
    elif shape == "masked":
        logits[torch.rand(3, vocab, generator=random) < 0.8] = -torch.inf
        logits[:, vocab // 3] = 0.5
    elif shape == "sorted":
        logits = logits.sort(-1).values
    elif shape == "wide":
        logits *= 100
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    _expect_winners(ops, logits, [params] * 3, NoiseKeys((seed,) * 3, (position, position + 1, position + 2)))


def test_rows_that_need_different_depths_share_a_batch(ops: Ops) -> None:
    logits = torch.cat([_logits(scale, 2) for scale in (9.0, 2.0, 0.1)])
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=40)] * 3
    keys = NoiseKeys(tuple(range(6)), tuple(range(6)))
    noise = gumbel(keys.seeds, keys.positions, VOCAB, "cpu")
    expected = [(_oracle(row, p) + n).argmax().item() for row, p, n in zip(logits, params, noise, strict=True)]
    assert ops.draw(logits.clone(), params, keys).tolist() == expected


def test_ties_at_the_boundary_stay_together(ops: Ops) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :300] = 1.0
    logits[0, 0] = 2.0
    for p, count in ((SamplingParams(top_k=2), 300), (SamplingParams(top_k=1), 1), (SamplingParams(top_p=0.02), 300)):
        assert _winners(ops, logits, p) <= set(range(count))
        assert len(_winners(ops, logits, p)) > count // 3


def test_few_finite_logits_are_found_at_the_first_bound() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [5, 50, 500]] = torch.tensor([1.0, 2.0, 3.0])
    kept, found = _kept(logits.topk(256).values, logits, [SamplingParams(top_k=100)])
    assert found.tolist() == [True]
    kept, found = _kept(logits.topk(256).values, logits, [SamplingParams(top_p=0.8)])
    assert (found.tolist(), int(kept.sum())) == ([True], 2)


@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_row_without_numbers_breaks_no_other_row(ops: Ops, params: SamplingParams, bad: float) -> None:
    logits = _logits(3.0, 2)
    expected = ops.draw(logits.clone(), [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist()
    logits[0] = bad
    got = ops.draw(logits, [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist()
    assert got[1] == expected[1]
    assert got[0] == NO_TOKEN


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=5000), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)]
)
def test_forbidden_tokens_are_never_drawn(ops: Ops, params: SamplingParams) -> None:
    logits = torch.full((1, 500), -torch.inf)
    logits[0, [5, 77, 499]] = torch.tensor([1.0, 2.0, 3.0])
    assert _winners(ops, logits, params) == {5, 77, 499}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 4321, VOCAB - 1])
def test_one_bad_logit_is_enough(ops: Ops, params: SamplingParams, bad: float, at: int) -> None:
    logits = _logits(3.0, 2)
    expected = ops.draw(logits.clone(), [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist()
    logits[0, at] = bad
    assert ops.draw(logits, [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist() == [NO_TOKEN, expected[1]]


@pytest.mark.parametrize("at", [0, 4321, VOCAB - 1])
def test_the_most_likely_of_rows_without_numbers_is_no_token(ops: Ops, at: int) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[1, at], logits[2, at], logits[4, at] = math.nan, math.inf, 1.0
    logits[3] = -math.inf
    greedy = [SamplingParams(temperature=0.0)] * 5
    assert ops.draw(logits, greedy, NoiseKeys((1,) * 5, (2,) * 5)).tolist() == [0, NO_TOKEN, NO_TOKEN, NO_TOKEN, at]


def test_many_rows_draw_what_each_draws_alone(ops: Ops) -> None:
    logits = _logits(3.0, 40, 5003)
    params = [
        SamplingParams(temperature=0.5 + i / 20, top_k=(0, 7, 900)[i % 3], top_p=(1.0, 0.9)[i % 2]) for i in range(40)
    ]
    keys = NoiseKeys(tuple(range(40)), tuple(range(100, 140)))
    together = ops.draw(logits.clone(), params, keys).tolist()
    alone = [ops.draw(logits[i : i + 1].clone(), [params[i]], keys.pick([i])).item() for i in range(40)]
    assert together == alone


@pytest.mark.parametrize("vocab", [1, 3, 33, 257])
def test_the_winner_among_equals_has_the_smallest_random_bits(ops: Ops, vocab: int) -> None:
    """So the bits are those of `random_bits` at every index."""
    seeds, positions = tuple(range(-1000, 1000)), tuple(range(2000))
    index = torch.arange(vocab, dtype=torch.int32).expand(2000, vocab)
    bits = random_bits(seeds, positions, index) & 0x7FFFFFFF
    logits = torch.zeros(2000, vocab)
    drawn = ops.draw(logits, [SamplingParams()] * 2000, NoiseKeys(seeds, positions))
    assert torch.equal(drawn, bits.argmin(-1))
    assert set(drawn.tolist()) == set(range(vocab))


@pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension")
def test_arguments_that_do_not_fit_are_refused() -> None:
    ops = CpuOps(1)
    kernels, logits, out = ops.kernels, torch.zeros(2, 9), torch.empty(2, dtype=torch.int64)
    row = (1.0, 0.0, 9, 1.0, 2**64 - 1)
    kernels.draw(logits, [row, row], [], out)
    with pytest.raises(ValueError, match="one per row"):
        kernels.draw(logits, [row], [], out)
    with pytest.raises(ValueError, match="one per row"):
        kernels.draw(logits, [row, row], [None], out)
    with pytest.raises(ValueError, match="negative"):
        kernels.draw(logits, [row, (-1.0, *row[1:])], [], out)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.draw(logits.bfloat16(), [row, row], [], out)
    with pytest.raises(ValueError, match="shorter"):
        kernels.draw(torch.zeros(1, 33), [row], [np.zeros(1, np.int32)], out[:1])
    with pytest.raises(ValueError, match="dtype"):
        kernels.draw(logits, [row, row], [None, np.zeros(1, np.float32)], out)
