"""Quantises K and V to 8 bits (int8 or fp8 e4m3), with one float32 scale per head and slot, and dequantises them.

The scale is max |x| over the largest such number. It follows the `dim` numbers of its vector."""

from __future__ import annotations

import torch

from kvferry.protocol.layout import SCALE_BYTES

FP8 = torch.float8_e4m3fn
PEAKS = {torch.int8: 127, FP8: 448}
"""Largest number of each 8-bit dtype."""
_TINY = torch.finfo(torch.float32).tiny


def vector_width(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of one K or V vector in a pool of `dtype`."""
    return dim + SCALE_BYTES if dtype in PEAKS else dim


def quantise(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [..., dim + 4] for x [..., dim], each number rounded to nearest, ties to even."""
    scale = (x.abs().amax(-1, keepdim=True).float() / PEAKS[dtype]).clamp_(min=_TINY)
    numbers = x.float() / scale
    codes = (numbers.round_() if dtype == torch.int8 else numbers).to(dtype)
    return torch.cat((as_bytes(codes), scale.view(torch.int8)), -1).view(dtype)


def dequantise(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x [..., dim] in `dtype` from [..., dim + 4]."""
    scale = as_bytes(stored)[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scale).to(dtype)


def as_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Return the same memory in int8 if it is in fp8, which PyTorch does not move about by index."""
    return stored.view(torch.int8) if stored.dtype == FP8 else stored
