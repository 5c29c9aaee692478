"""`mixture` computes a mixture-of-experts layer: routes tokens, sorts them by expert, and sums weighted outputs.

The layers are those of Shazeer et al. 2017. Tokens are sorted by expert, so an expert's dense layers run once a step:
as grouped products if the backend has them, which divide the work on the device; otherwise one expert after the other,
and the host counts the tokens of each. A token's result depends on that token alone: its experts' outputs are added in
float32 in the order of their ranks, then the shared expert's. Experts may compute in a latent of fewer numbers
(Nemotron 3 Super)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.kernels.decoder_spec import Experts, GroupedGated
from kvferry.kernels.expert_routing import logistic, route

Activated = Callable[[torch.Tensor], torch.Tensor]
"""Computes act(gate) * up for gate and up [n, 2 * inner] side by side."""


def mixture(experts: Experts, x: torch.Tensor, activated: Activated) -> torch.Tensor:
    """Return the weighted sum of each token's experts for x [T, hidden], in x's dtype."""
    weights, chosen = route(experts.router(x, torch.float32), experts.routing, experts.correction)
    return mixed(experts, x, weights, chosen, activated)


def mixed(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activated: Activated
) -> torch.Tensor:
    """Compute `mixture` for the weights and experts that `route` returned."""
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    taken = x if experts.latent_down is None else experts.latent_down(x)
    inputs = taken.index_select(0, order // experts.routing.chosen)
    if experts.routing.on_inputs:
        inputs = (inputs * weights.flatten()[order, None]).to(x.dtype)
        weights = torch.ones_like(weights)
    if experts.grouped is not None:
        outputs = _grouped(experts.grouped, inputs, pairs[order], activated)
    else:
        outputs = _one_by_one(experts, inputs, pairs, activated)
    places = order.argsort().view(chosen.shape)
    total = outputs.index_select(0, places[:, 0]) * weights[:, :1]
    for rank in range(1, experts.routing.chosen):
        total += outputs.index_select(0, places[:, rank]) * weights[:, rank, None]
    if experts.latent_up is not None:
        total = experts.latent_up(total.to(x.dtype), torch.float32)
    if (shared := experts.shared) is not None:
        common = shared.down(activated(shared.gate_up(x)), torch.float32)
        gate = experts.shared_gate
        total += common if gate is None else common * logistic(gate(x, torch.float32))
    return experts.joined(total).to(x.dtype)


def _grouped(grouped: GroupedGated, inputs: torch.Tensor, chosen: torch.Tensor, activated: Activated) -> torch.Tensor:
    """Return float32 [n, width] for inputs [n, width] sorted by expert; chosen: the expert of each."""
    numbers = torch.arange(len(grouped.each), device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    return grouped.down(activated(grouped.gate_up(inputs, ends, chosen)), ends, chosen).float()


def _one_by_one(experts: Experts, inputs: torch.Tensor, pairs: torch.Tensor, activated: Activated) -> torch.Tensor:
    """Compute `_grouped` without grouped products. pairs: each input's expert, in token order. Waits for the device."""
    outputs, first = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device), 0
    for mlp, count in zip(experts.each, pairs.bincount(minlength=len(experts.each)).tolist(), strict=True):
        if count and mlp is not None:
            rows = slice(first, first + count)
            outputs[rows] = mlp.down(activated(mlp.gate_up(inputs[rows])), torch.float32)
        first += count
    return outputs
