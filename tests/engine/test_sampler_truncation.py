"""What min_p, top_k and top_p keep, at sizes where not the whole vocabulary is ranked."""

import math

import pytest
import torch

from engine.noise import gumbel
from engine.truncation import NoiseKeys, _draw_on_device, _kept, draw
from protocol.sampling import SamplingParams

VOCAB = 10_000


def _oracle(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Logits [vocab] with everything not kept at -inf; by full sorts in double precision."""
    x = logits.double()
    x = x.masked_fill(x.softmax(-1) < p.min_p * x.softmax(-1).max(), -math.inf)
    if 0 < p.top_k < len(x):
        x = x.masked_fill(x < x.sort(descending=True).values[p.top_k - 1], -math.inf)
    if p.top_p < 1:
        probs, order = x.softmax(-1).sort(descending=True)
        cut = order[probs.cumsum(-1) - probs >= p.top_p]
        x[cut] = -math.inf
    return x


def _logits(scale: float, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(17)) * scale


@pytest.mark.parametrize("choose", [draw, _draw_on_device])
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
def test_the_winner_is_the_oracles(choose, scale, params):
    logits = _logits(scale)
    keys = NoiseKeys((1, 2, 3, 4, 5, 6), (7,) * 6)
    got = choose(logits.clone(), [params] * 6, keys)
    noise = gumbel(keys.seeds, keys.positions, VOCAB, "cpu")
    expected = torch.stack([_oracle(row, params) for row in logits]) + noise
    assert got.tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("choose", [draw, _draw_on_device])
def test_rows_that_need_different_depths_share_a_batch(choose):
    logits = torch.cat([_logits(scale, 2) for scale in (9.0, 2.0, 0.1)])
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=40)] * 3
    keys = NoiseKeys(tuple(range(6)), tuple(range(6)))
    noise = gumbel(keys.seeds, keys.positions, VOCAB, "cpu")
    expected = [(_oracle(row, p) + n).argmax().item() for row, p, n in zip(logits, params, noise, strict=True)]
    assert choose(logits.clone(), params, keys).tolist() == expected


def test_ties_at_the_boundary_stay_together():
    logits = torch.zeros(1, VOCAB)
    logits[0, :300] = 1.0
    logits[0, 0] = 2.0
    for p, count in ((SamplingParams(top_k=2), 300), (SamplingParams(top_k=1), 1), (SamplingParams(top_p=0.02), 300)):
        assert _winners(logits, p) <= set(range(count))
        assert len(_winners(logits, p)) > count // 3


def _winners(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    positions = tuple(range(400))
    rows = logits.expand(400, -1).clone()
    return set(draw(rows, [params] * 400, NoiseKeys((3,) * 400, positions)).tolist())


def test_few_finite_logits_are_found_at_the_first_bound():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [5, 50, 500]] = torch.tensor([1.0, 2.0, 3.0])
    kept, found = _kept(logits.topk(256).values, logits, [SamplingParams(top_k=100)])
    assert found.tolist() == [True]
    kept, found = _kept(logits.topk(256).values, logits, [SamplingParams(top_p=0.8)])
    assert (found.tolist(), int(kept.sum())) == ([True], 2)


@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)])
def test_a_row_without_numbers_breaks_no_other_row(params):
    logits = _logits(3.0, 2)
    expected = draw(logits.clone(), [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist()
    logits[0] = torch.nan
    assert draw(logits, [params] * 2, NoiseKeys((1, 2), (3, 4))).tolist()[1] == expected[1]
