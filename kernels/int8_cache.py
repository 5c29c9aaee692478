"""K and V in int8: each vector of a head and slot as `dim` numbers and one float32 scale behind them, max |x| / 127."""

from __future__ import annotations

import torch

from protocol.layout import SCALE_BYTES

_LEAST = torch.finfo(torch.float32).tiny


def vector_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of one K or V vector in a pool of `dtype`."""
    return dim + SCALE_BYTES if dtype == torch.int8 else dim


def quantise(x: torch.Tensor) -> torch.Tensor:
    """int8 [..., dim + 4] of x [..., dim], rounded to nearest even."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).clamp_(min=_LEAST)
    return torch.cat(((x.float() / scale).round_().to(torch.int8), scale.view(torch.int8)), -1)


def dequantise(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., dim] in `dtype` of int8 [..., dim + 4]."""
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scale).to(dtype)
