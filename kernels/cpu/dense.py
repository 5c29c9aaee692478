"""Dense layers in bfloat16 over weights packed once. Measured ahead of or level with PyTorch (oneDNN) for any number of
rows on each instruction set (benchmarks/cpu_kernels.py), so the plain weight is not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.cpu._native import Kernels


class PackedLinear:
    """y = x @ weight.T + bias of bfloat16 x [n, in]. A row's result does not depend on the other rows."""

    __slots__ = ("in_features", "kernels", "out_features", "packed")

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None):
        self.kernels = kernels
        self.out_features, self.in_features = weight.shape
        self.packed = kernels.pack(weight, None if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        self.kernels.dense(self.packed, x, out)
        return out


def packable(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and weight.is_contiguous()
