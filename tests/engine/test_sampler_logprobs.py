"""Log-probabilities of drawn and of given tokens."""

import pytest
import torch

from kvferry.engine.sampler import SampleRow, sample, score_prompt
from kvferry.kernels.reference import ReferenceOps
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import SamplingParams


def _check(entry: TokenLogprobs, logits: torch.Tensor, top: int) -> None:
    expected = logits.double().log_softmax(-1)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-4)
    assert entry.rank == 1 + (logits > logits[entry.token_id]).sum().item()
    order = sorted(range(len(logits)), key=lambda t: (-logits[t].item(), t))
    assert [token for token, _ in entry.top] == order[:top]
    assert [value for _, value in entry.top] == pytest.approx(expected[order[:top]].tolist(), abs=1e-4)


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(2)) * 4
    rows = [
        SampleRow(SamplingParams(logprobs=20, temperature=0.3, seed=1), [1], 1),
        SampleRow(SamplingParams(logprobs=None, seed=4), [1], 1),
        SampleRow(SamplingParams(logprobs=0, logit_bias=((77, 100.0),), temperature=0.0), [1], 1),
        SampleRow(SamplingParams(logprobs=3, repetition_penalty=3.0, top_k=2, seed=9), list(range(200)), 100),
    ]
    sampled = sample(logits.clone(), rows, ReferenceOps())
    assert [s.logprobs is None for s in sampled] == [False, True, False, False]
    assert sampled[2].token_id == 77
    for i, row in enumerate(rows):
        if sampled[i].logprobs is not None:
            assert sampled[i].logprobs.token_id == sampled[i].token_id
            _check(sampled[i].logprobs, logits[i], row.params.logprobs)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_score_prompt(top):
    logits = torch.randn(150, 300, generator=torch.Generator().manual_seed(3)) * 4
    next_ids = [(7 * i) % 300 for i in range(150)]
    scored = score_prompt(logits, next_ids, top)
    assert [entry.token_id for entry in scored] == next_ids
    for entry, row in zip(scored, logits, strict=True):
        _check(entry, row, top)


def test_score_prompt_of_nothing_and_of_a_small_vocabulary():
    assert score_prompt(torch.zeros(0, 9), [], 5) == []
    entry = score_prompt(torch.zeros(1, 4), [3], 20)[0]
    assert (entry.rank, [token for token, _ in entry.top]) == (1, [0, 1, 2, 3])


def test_ties_are_listed_by_id_and_do_not_lower_the_rank():
    logits = torch.zeros(1, 100)
    logits[0, [90, 30, 60]] = 4.0
    entry = score_prompt(logits, [90], 3)[0]
    assert (entry.rank, [token for token, _ in entry.top]) == (1, [30, 60, 90])


def test_forbidden_tokens_keep_their_raw_logprob():
    logits = torch.zeros(1, 8)
    logits[0, 2] = 9.0
    row = SampleRow(SamplingParams(temperature=0.0, min_tokens=1, eos_token_ids=(2,), logprobs=1), [1], 1)
    sampled = sample(logits, [row], ReferenceOps())[0]
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    assert sampled.logprobs.rank == 2
    assert sampled.logprobs.top[0][0] == 2
