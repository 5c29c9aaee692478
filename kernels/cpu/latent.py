"""Latent attention of prompts on the compiled kernels, in both forms (`kernels.latent`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cpu.dense import PackedLinear
from kernels.latent import absorbed, expands
from kernels.plan import BatchPlan
from kernels.step import Latent

if TYPE_CHECKING:
    from kernels.cpu._native import Kernels

_UNIT = 32
_SPAN, _BYTES = 2048, 48 << 20
"""Expanded keys and values that are held at a time: positions, and bytes of all heads."""


def native(q: torch.Tensor, own: Latent) -> bool:
    """The kernels have both forms: in bfloat16, of dims that are multiples of 32."""
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
    """Those of `q` [T, heads, rotated + plain] that are no decodes, to their rows of `out` [T, heads, value]."""
    start = plan.num_decodes
    for seq in range(plan.num_decodes, plan.num_seqs):
        tokens = slice(start, start + plan.query_lens[seq])
        attend = _expanded if expands(plan.query_lens[seq], plan.total_lens[seq], own) else _absorbed
        attend(kernels, q[tokens], kv_layer, plan.block_table[seq], plan.total_lens[seq], scale, own, out[tokens])
        start = tokens.stop


def _expanded(
    kernels: Kernels,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    blocks: torch.Tensor,
    total_len: int,
    scale: float,
    own: Latent,
    out: torch.Tensor,
) -> None:
    assert isinstance(own.expand, PackedLinear)
    kernels.expanded(own.expand.weights, q, kv_layer, blocks, total_len, scale, _SPAN, _BYTES, out)


def _absorbed(
    kernels: Kernels,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    blocks: torch.Tensor,
    total_len: int,
    scale: float,
    own: Latent,
    out: torch.Tensor,
) -> None:
    queries = absorbed(q, own)
    summed = torch.empty(*q.shape[:2], own.rank, dtype=q.dtype)
    kernels.prefill(queries, kv_layer, blocks, total_len, scale, 0, 0.0, None, summed)
    out.copy_(own.up_v(summed))
