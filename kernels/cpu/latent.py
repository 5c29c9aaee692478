"""Latent attention (MLA) of prompts with the compiled CPU kernels, absorbed or expanded (`kernels.latent`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.latent import absorbed, expands

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels

_UNIT = 32
_SPAN, _BYTES = 2048, 48 << 20
"""Limits of expanded keys and values in memory at a time: positions, and bytes of all heads."""


def native(q: torch.Tensor, own: Latent) -> bool:
    """Return whether the kernels have both forms: in bfloat16, for dims that are multiples of 32."""
    dims = (own.rotated, own.plain, own.rank, own.value)
    return q.dtype == torch.bfloat16 and isinstance(own.expand, PackedLinear) and not any(d % _UNIT for d in dims)


def attend_prompts(
    kernels: Kernels,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    own: Latent,
    out: torch.Tensor,
) -> None:
    """Attend for the rows of `q` [T, heads, rotated + plain] that are not decodes; write `out` [T, heads, value]."""
    assert isinstance(own.expand, PackedLinear)
    start = plan.num_decodes
    for seq in range(plan.num_decodes, plan.num_seqs):
        tokens = slice(start, start + plan.query_lens[seq])
        part, blocks, total_len = q[tokens], plan.block_table[seq], plan.total_lens[seq]
        start = tokens.stop
        if expands(len(part), total_len, own):
            weights = own.expand.weights
            kernels.expanded(weights, part, kv_layer, blocks, total_len, scale, _SPAN, _BYTES, out[tokens])
        else:
            summed = torch.empty(*part.shape[:2], own.rank, dtype=q.dtype)
            kernels.prefill(absorbed(part, own), kv_layer, blocks, total_len, scale, 0, 0.0, None, None, summed)
            out[tokens] = own.up_v(summed)
