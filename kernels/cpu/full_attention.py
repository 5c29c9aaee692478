"""Attention without a mask on the CPU's kernels: each token attends to all tokens of its image or clip."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.ops import CpuOps

_UNIT, _MAX_HEAD_DIM = 32, 256
"""Head dims that the kernel takes are multiples of the first, up to the second."""


def fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel computes attention of these tensors [n, heads, T, dim]."""
    dim = query.shape[-1]
    return (
        query.dtype == torch.bfloat16
        and query.shape[2] == value.shape[2]
        and dim == value.shape[-1]
        and dim % _UNIT == 0
        and dim <= _MAX_HEAD_DIM
    )


def full_attention(
    ops: CpuOps, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return [n, T, heads, dim] of query, key and value [n, heads, T, dim]; each of the n is one block of a cache."""
    count, heads, tokens, dim = query.shape
    cache = torch.stack((key, value), 1)
    out = torch.empty(count, tokens, heads, dim, dtype=query.dtype)
    last = torch.full((tokens,), tokens - 1, dtype=torch.int32)
    for place in range(count):
        block, own = torch.tensor([place], dtype=torch.int32), query[place].transpose(0, 1).contiguous()
        ops.kernels.prefill(own, cache, block, tokens, scale, 0, 0.0, None, last, out[place])
    return out
