"""Mixture-of-experts routing: `route` chooses each token's experts and their weights by a Routing rule.

Groups of experts: DeepSeek-V2 (2024), section 2.2; the sigmoid and the correction of its scores: DeepSeek-V3 (2024),
section 2.1.2; the threshold around the best logit: SparseMixer-v2 (Liu et al. 2024), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a token chooses its experts: the `chosen` ones of the highest scores, which become their weights.

    renormalised    weights are divided by their sum
    sigmoid         a score is the sigmoid of its logit; otherwise scores are the softmax over all experts
    groups, kept    only the `kept` best of `groups` groups of consecutive experts are considered
    judged          a group is ranked by the sum of its `judged` highest scores
    factor          weights are multiplied by it
    min_sum         lower bound of the sum of weights, if renormalised
    tolerance       if above 0, each chosen expert has a softmax of its own, over the logits of the experts not chosen
                    yet, without those below the best by more than this share of the larger magnitude
    on_inputs       weights multiply an expert's inputs instead of its outputs
    """

    chosen: int
    renormalised: bool = False
    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    judged: int = 1
    factor: float = 1.0
    min_sum: float = 1e-20
    tolerance: float = 0.0
    on_inputs: bool = False


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights float32 and experts int64, [T, chosen] each, by rank, for float32 logits [T, experts].

    correction, float32 [experts]: added to scores for the choice of experts, not for their weights."""
    if routing.tolerance:
        return _rank_by_rank(logits, routing)
    scores = logistic(logits) if routing.sigmoid else logits.softmax(-1)
    compared = scores if correction is None else scores + correction
    if routing.kept < routing.groups:
        compared = _of_best_groups(compared, routing)
    elif correction is None:
        compared = logits  # large ones have equal scores
    chosen = compared.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.renormalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.min_sum)
    return weights * routing.factor, chosen


def logistic(x: torch.Tensor) -> torch.Tensor:
    """Return the logistic function of x [T, n], with the same bits for a number wherever it stands.

    On a CPU PyTorch computes most numbers of a dense tensor by vector instructions and the last ones by others, which
    round otherwise; the numbers of a tensor with gaps it computes one by one."""
    if x.device.type != "cpu":
        return x.sigmoid()
    spaced = x.new_empty(*x.shape, 2)
    spaced[..., 0] = x
    return spaced[..., 0].sigmoid()


def _rank_by_rank(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `route` for a rule with a tolerance: each chosen expert has a softmax of its own."""
    weights, chosen, left = [], [], logits
    for _ in range(routing.chosen):
        best, expert = left.max(-1, keepdim=True)
        beyond = (best - logits) / torch.maximum(logits.abs(), best) > routing.tolerance
        weights.append(left.masked_fill(beyond, float("-inf")).softmax(-1).gather(1, expert))
        chosen.append(expert)
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(weights, 1) * routing.factor, torch.cat(chosen, 1)


def _of_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return scores [T, experts] with -inf in all groups but the best."""
    grouped = scores.view(len(scores), routing.groups, -1)
    best = grouped.topk(routing.judged, dim=-1).values.sum(-1).topk(routing.kept, dim=-1).indices
    left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
