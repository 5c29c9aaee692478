"""Mixtures of experts (Shazeer et al. 2017): gated MLPs of which each token passes through a few.

Tokens are laid together by expert, so the dense layers of an expert run once a step. What a token is given depends on
the token alone: its experts' outputs are added in the order of their ranks, in float32, then that of what all share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.routing import route
from kernels.step import Experts

Activated = Callable[[torch.Tensor], torch.Tensor]
"""act(gate) * up of gate and up [n, 2 * inner] side by side."""


def mixture(experts: Experts, x: torch.Tensor, activated: Activated) -> torch.Tensor:
    """What the experts of each token of x [T, hidden] put out, weighted and added, in x's dtype."""
    weights, chosen = route(experts.router(x, torch.float32), experts.routing, experts.correction)
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    outputs = torch.zeros(len(pairs), x.shape[1], dtype=torch.float32, device=x.device)
    inputs, first = x.index_select(0, order // experts.routing.chosen), 0
    for mlp, count in zip(experts.each, pairs.bincount(minlength=len(experts.each)).tolist(), strict=True):
        if count and mlp is not None:
            rows = slice(first, first + count)
            outputs[rows] = mlp.down(activated(mlp.gate_up(inputs[rows])), torch.float32)
        first += count
    places = order.argsort().view(chosen.shape)
    total = outputs.index_select(0, places[:, 0]) * weights[:, :1]
    for rank in range(1, experts.routing.chosen):
        total += outputs.index_select(0, places[:, rank]) * weights[:, rank, None]
    if (shared := experts.shared) is not None:
        total += shared.down(activated(shared.gate_up(x)), torch.float32)
    return experts.joined(total).to(x.dtype)
