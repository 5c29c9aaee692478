"""The whole sampler: stages against a naive oracle, reproducibility, independence of the batch, distribution."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.sampler import Sampled, SampleRow
from kvferry.engine.sampler import sample as sample_by
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.gumbel_noise import gumbel
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sampling import NO_TOKEN
from kvferry.protocol.sampling import SamplingParams

VOCAB = 40
DRAWS = 4000
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def table() -> list[Ops]:
    return [ReferenceOps(), CpuOps(2)] if instruction_set() else [ReferenceOps()]


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
    """What every row of the operations table that runs here answers, with and without knowing the largest logits."""
    best = logits.argmax(dim=-1).tolist()
    first, *others = [
        sample_by(logits.clone(), [replace(row) for row in rows], ops, known)
        for ops in table()
        for known in (None, best)
    ]
    assert all(other == first for other in others)
    return first


def _logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _edited(logits: list[float], row: SampleRow) -> list[float]:
    """The oracle of the stages that edit logits: loops over plain numbers."""
    p, out = row.params, row.token_ids[row.prompt_len :]
    if len(out) < p.min_tokens:
        logits = [-math.inf if t in p.ending_token_ids else x for t, x in enumerate(logits)]
    logits = [x + sum(b for t2, b in p.logit_bias if t2 == t) for t, x in enumerate(logits)]
    r = p.repetition_penalty
    logits = [(x / r if x > 0 else x * r) if t in row.token_ids else x for t, x in enumerate(logits)]
    return [x - p.frequency_penalty * out.count(t) - p.presence_penalty * (t in out) for t, x in enumerate(logits)]


def _probabilities(logits: list[float], p: SamplingParams) -> list[float]:
    """The oracle of temperature, min_p, top_k and top_p: full sorts, in double precision."""
    scaled = [x / p.temperature for x in logits]
    scaled = [x if math.exp(x - max(scaled)) >= p.min_p else -math.inf for x in scaled]
    if 0 < p.top_k < len(scaled):
        kth = sorted(scaled, reverse=True)[p.top_k - 1]
        scaled = [x if x >= kth else -math.inf for x in scaled]
    probs = _softmax(scaled)
    if p.top_p < 1.0:
        probs = [q if sum(other for other in probs if other > q) < p.top_p else 0.0 for q in probs]
    return [q / sum(probs) for q in probs]


def _softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def _oracle_token(logits: torch.Tensor, row: SampleRow) -> int:
    edited = _edited(logits.double().tolist(), row)
    if row.params.temperature == 0.0:
        return max(range(len(edited)), key=lambda t: edited[t])
    probs = _probabilities(edited, row.params)
    noise = gumbel([row.params.seed], [len(row.token_ids)], len(edited), "cpu")[0].tolist()
    return max(range(len(edited)), key=lambda t: math.log(probs[t]) + noise[t] if probs[t] > 0 else -math.inf)


def _draws(logits: torch.Tensor, params: SamplingParams, count: int = DRAWS) -> list[int]:
    """Tokens drawn from one row of logits at `count` different positions."""
    rows = [SampleRow(params, [0] * position, position) for position in range(1, 9)]
    tokens: list[int] = []
    for seed in range(count // len(rows)):
        seeded = [replace(row, params=replace(params, seed=seed)) for row in rows]
        tokens += [s.token_id for s in sample(logits.expand(len(rows), -1), seeded)]
    return tokens


tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.913]),
    top_k=st.sampled_from([0, -1, 1, 3, 17, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.37]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.1, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.7]),
    logit_bias=st.lists(st.tuples(tokens, st.sampled_from([-100.0, -1.0, 2.5, 100.0])), max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    eos_token_ids=st.just((2,)),
    ignore_eos=st.booleans(),
)
sample_rows = st.builds(
    lambda p, prompt, output: SampleRow(p, prompt + output, len(prompt)),
    params,
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, max_size=12),
)


@given(st.lists(sample_rows, min_size=1, max_size=6), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_equals_the_oracle(rows, seed):
    logits = _logits(seed, len(rows))
    got = [s.token_id for s in sample(logits, rows)]
    assert got == [_oracle_token(logits[i], row) for i, row in enumerate(rows)]


@given(st.lists(sample_rows, min_size=2, max_size=6), st.integers(0, 2**32), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_row_never_depends_on_the_others(rows, seed, random):
    logits = _logits(seed, len(rows))
    together = sample(logits, rows)
    order = random.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[i] for i in order])
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_independence_holds_at_real_vocabulary_size():
    logits = _logits(5, 6, 49_152)
    rows = [
        SampleRow(SamplingParams(seed=1), [1], 1),
        SampleRow(SamplingParams(seed=2, top_p=0.9, logprobs=5), [1, 2], 1),
        SampleRow(SamplingParams(seed=3, top_k=300), [1], 1),
        SampleRow(SamplingParams(temperature=0.0, logprobs=1), [1], 1),
        SampleRow(SamplingParams(seed=5, top_p=0.9999, temperature=2.0), [1], 1),
        SampleRow(SamplingParams(seed=6, min_p=0.01, top_k=9_000, top_p=0.99), [1], 1),
    ]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together


def test_all_greedy_is_the_argmax_and_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, VOCAB)
    logits[1, [7, 30]] = 5.0
    rows = [SampleRow(SamplingParams(temperature=0.0), [1], 1)] * 2
    assert sample(logits, rows) == [Sampled(0, None), Sampled(7, None)]
    assert sample(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_vanishing_temperature_is_greedy(temperature):
    logits = _logits(3)
    row = SampleRow(SamplingParams(temperature=temperature), [1], 1)
    assert sample(logits, [row])[0].token_id == logits.argmax().item()


def test_the_same_seed_and_position_draw_the_same_token():
    params = SamplingParams(seed=77)
    logits = _logits(1, 1, 5000)
    first = sample(logits, [SampleRow(params, [5] * 40, 40)])
    assert sample(logits, [SampleRow(params, (5,) * 40, 12)]) == first
    later = {sample(logits, [SampleRow(params, [5] * n, 40)])[0].token_id for n in range(40, 60)}
    assert len(later) > 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, top_k=12, top_p=0.95, temperature=1.7),
    ],
)
def test_empirical_distribution_is_the_softmax(params):
    logits = _logits(11, 1, 24)
    probs = torch.tensor(_probabilities(logits[0].double().tolist(), params))
    counts = torch.tensor(_draws(logits, params)).bincount(minlength=24).double()
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    usual = expected >= 5
    rest = (counts[~usual].sum() - expected[~usual].sum()).abs()
    assert rest <= 5 * math.sqrt(expected[~usual].sum() + 1)
    chi_square = ((counts - expected) ** 2 / expected)[usual].sum()
    freedom = int(usual.sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_min_tokens_holds_until_enough_outputs_exist():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3] = 50.0, 40.0
    params = SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=(2,), stop_token_ids=(3,))

    def drawn(outputs: int, params: SamplingParams) -> int:
        return sample(logits, [SampleRow(params, [9] * (4 + outputs), 4)])[0].token_id

    assert [drawn(n, params) for n in range(5)] == [0, 0, 0, 2, 2]
    assert drawn(0, replace(params, ignore_eos=True)) == 2
    assert drawn(0, replace(params, ignore_eos=True, stop_token_ids=(2,))) == 3


def test_ending_tokens_that_the_model_has_not_are_no_concern_of_min_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1.0
    params = SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=(VOCAB, 3, VOCAB + 7))
    assert [s.token_id for s in sample(logits, [SampleRow(params, [1], 1), SampleRow(GREEDY, [1], 1)])] == [0, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_p=0.5, logprobs=0, repetition_penalty=1.3),
    ],
)
def test_a_row_whose_logits_are_no_numbers_draws_nothing_and_the_others_do(bad, whole, params):
    logits = _logits(3, 3)
    rows = [SampleRow(params, [1], 1), SampleRow(GREEDY, [1], 1), SampleRow(SamplingParams(seed=2), [1], 1)]
    expected = sample(logits, rows)
    logits[0, slice(None) if whole else 17] = bad
    got = [sample_by(logits.clone(), [replace(row) for row in rows], ops) for ops in table()]
    assert all(drawn[1:] == expected[1:] for drawn in got)
    if whole or bad != -math.inf:
        assert [drawn[0] for drawn in got] == [Sampled(NO_TOKEN, None)] * len(got)


def test_prompt_tokens_count_for_repetition_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 2.0, 1.5

    def drawn(**fields: Any) -> int:
        row = SampleRow(SamplingParams(temperature=0.0, **fields), [4, 9], 1)
        return sample(logits, [row])[0].token_id

    assert drawn() == drawn(frequency_penalty=2.0) == drawn(presence_penalty=2.0) == 4
    assert drawn(repetition_penalty=1.5) == 5
