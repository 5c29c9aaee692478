"""Which experts a token is given, against the rule written out for one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from kvferry.kernels.expert_routing import Routing, route

EXPERTS, TOKENS = 12, 60
LOGITS = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5)) * 2
CORRECTION = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(6))
KINDS = {
    "softmax": Routing(3),
    "renormalised": Routing(3, renormalised=True),
    "factor": Routing(2, factor=16.0),
    "groups": Routing(3, groups=4, kept=2, factor=2.5),
    "one group": Routing(3, groups=4, kept=1),
    "sigmoid": Routing(4, renormalised=True, sigmoid=True, groups=3, kept=2, judged=2, factor=2.5),
    "sigmoid, any group": Routing(4, sigmoid=True),
    "a least sum": Routing(3, renormalised=True, min_sum=0.9),
}


def by_hand(logits: list[float], correction: list[float], routing: Routing) -> dict[int, float]:
    """Weight of each expert that is chosen."""
    total = sum(map(math.exp, logits))
    scores = [1 / (1 + math.exp(-x)) if routing.sigmoid else math.exp(x) / total for x in logits]
    compared = [score + added for score, added in zip(scores, correction, strict=True)]
    size = EXPERTS // routing.groups
    groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
    groups.sort(key=lambda group: -sum(sorted((compared[e] for e in group), reverse=True)[: routing.judged]))
    allowed = [expert for group in groups[: routing.kept] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -compared[expert])[: routing.chosen]
    whole = max(sum(scores[expert] for expert in chosen), routing.min_sum) if routing.renormalised else 1.0
    return {expert: scores[expert] / whole * routing.factor for expert in chosen}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_rule(kind: str, corrected: bool) -> None:
    routing = KINDS[kind]
    correction = CORRECTION if corrected else torch.zeros(EXPERTS)
    weights, chosen = route(LOGITS, routing, CORRECTION if corrected else None)
    for token in range(TOKENS):
        wanted = by_hand(LOGITS[token].tolist(), correction.tolist(), routing)
        found = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert list(found) == list(wanted)
        assert found == pytest.approx(wanted, rel=1e-5)


def test_the_best_of_saturated_sigmoids_are_chosen() -> None:
    """float32 has no numbers between the scores of these logits."""
    logits = torch.tensor([[20.0, 40.0, 30.0, 50.0]])
    weights, chosen = route(logits, Routing(2, sigmoid=True))
    assert chosen.tolist() == [[3, 1]]
    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("tolerance", [0.1, 0.5])
def test_each_rank_has_a_softmax_of_its_own(tolerance: float) -> None:
    weights, chosen = route(LOGITS, Routing(2, tolerance=tolerance))
    several = 0
    for token in range(TOKENS):
        left = dict(enumerate(LOGITS[token].tolist()))
        for rank in range(2):
            expert = max(left, key=left.__getitem__)
            best = left[expert]
            near = [x for x in left.values() if (best - x) / max(abs(x), best) <= tolerance]
            several += len(near) > 1
            assert int(chosen[token, rank]) == expert
            assert float(weights[token, rank]) == pytest.approx(1 / sum(math.exp(x - best) for x in near), rel=1e-5)
            del left[expert]
    assert several > 3, "some softmaxes must have several experts"
