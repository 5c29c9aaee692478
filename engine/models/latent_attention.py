"""Multi-head latent attention (MLA) of one layer, from its input to its output, over a backend's operations."""

from __future__ import annotations

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.ops import Ops


def latent_attention(
    own: Latent,
    x: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: BatchPlan,
    ops: Ops,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Return the attention [T, hidden] of x [T, hidden]; write its latents into the pool. rope: cos and sin."""
    made_of = x
    if own.q_a is not None and own.q_norm is not None:
        made_of = ops.rms_norm(own.q_a(x), own.q_norm, own.eps)
    q = own.q(made_of).view(len(x), -1, own.rotated + own.plain)
    key, latent = torch.split(own.kv_a(x), [own.rotated, own.rank], 1)
    cached = torch.cat((key, ops.rms_norm(latent, own.kv_norm, own.eps)), 1)
    q = ops.rope_and_cache(q, cached[:, None], None, *rope, kv_layer, plan)
    own.awaited()
    return own.o(ops.latent_attention(q, kv_layer, plan, scale, own).flatten(1))
