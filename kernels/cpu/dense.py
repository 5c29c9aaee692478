"""Dense layers in bfloat16 over weights packed once; PyTorch (oneDNN) where it is ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kernels.cpu._native import Kernels

MAX_ROWS = {"avx512_bf16": 1 << 30, "avx512": 16, "avx2": 8, "portable": 4}
"""Rows up to which the packed product is ahead of PyTorch's, by instruction set (benchmarks/cpu_kernels.py)."""


class PackedLinear:
    """y = x @ weight.T + bias of bfloat16 x [n, in]. Keeps the plain weight for large batches."""

    __slots__ = ("bias", "kernels", "max_rows", "packed", "weight")

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None):
        self.kernels = kernels
        self.weight = weight
        self.bias = bias
        self.max_rows = MAX_ROWS[kernels.instruction_set]
        self.packed = kernels.pack(weight, None if bias is None else bias.float())

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.max_rows:
            return F.linear(x, self.weight, self.bias)
        out = torch.empty(len(x), len(self.weight), dtype=x.dtype)
        self.kernels.dense(self.packed, x, out)
        return out


def packable(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and weight.is_contiguous()
