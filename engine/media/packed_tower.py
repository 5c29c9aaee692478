"""Replaces a media tower's layers in bfloat16 on a CPU by compiled kernels: dense, patch, activation and attention."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kvferry.engine.media.tower_attention import set_attention
from kvferry.engine.models.hf_dense import DenseModule
from kvferry.kernels.activation import GELU, GELU_TANH, Activation
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.linear import Linear
from kvferry.runtime.thread_priority import lower_priority

NICENESS = 10
"""Niceness of towers' threads, in steps, so that those of streams run first."""
_ACTIVATIONS = {"GELUActivation": GELU, "GELUTanh": GELU_TANH}
"""Activations by the names of transformers' modules."""


class PatchModule(nn.Module):
    """Replacement of a convolution whose windows do not overlap: a dense layer of each patch."""

    def __init__(self, linear: Linear, convolution: Any) -> None:
        super().__init__()
        self.linear, self._sides = linear, tuple(convolution.kernel_size)
        self.weight = convolution.weight.to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, out, *patches] of x [n, channels, *sizes]; what fills no patch is cut off."""
        count, channels, dims = *x.shape[:2], len(self._sides)
        patches = [size // side for size, side in zip(x.shape[2:], self._sides, strict=True)]
        for axis, (number, side) in enumerate(zip(patches, self._sides, strict=True), 2):
            x = x.narrow(axis, 0, number * side)
        cut = [each for pair in zip(patches, self._sides, strict=True) for each in pair]
        of_patch, of_side = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
        x = x.reshape(count, channels, *cut).permute(0, *of_patch, 1, *of_side)
        return self.linear(x.reshape(count * math.prod(patches), -1)).view(count, *patches, -1).movedim(-1, 1)


class ActivationModule(nn.Module):
    """Replacement of an activation of each number by itself."""

    def __init__(self, ops: CpuOps, activation: Activation) -> None:
        super().__init__()
        self._ops, self._activation = ops, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of x, of any shape."""
        return self._ops.activate(x.reshape(-1, x.shape[-1]), self._activation).view(x.shape)


@torch.no_grad()
def pack_tower(module: Any) -> None:
    """Replace the layers of a tower in bfloat16 on a CPU that have compiled kernels, if these are installed.

    Its kernels have threads of their own, of the priority of background work."""
    if module.dtype != torch.bfloat16 or module.device.type != "cpu" or instruction_set() is None:
        return
    with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(NICENESS,)) as quiet:
        ops = quiet.submit(CpuOps).result()  # threads have the priority of the one that makes them
    for name in [name for name, _ in module.named_modules()]:
        part = module.get_submodule(name)
        if type(part) is nn.Linear:  # the module around a subclass may read its weight
            module.set_submodule(name, DenseModule(ops.linear(part.weight.contiguous(), part.bias), part.weight))
        elif _is_patches(part):
            flat = part.weight.flatten(1).contiguous()
            module.set_submodule(name, PatchModule(ops.linear(flat, part.bias), part))
        elif (activation := _ACTIVATIONS.get(type(part).__name__)) is not None:
            module.set_submodule(name, ActivationModule(ops, activation))
    if hasattr(module, "set_attn_implementation"):
        set_attention(module, ops)


def _is_patches(part: Any) -> bool:
    """Return whether a module is a convolution whose windows do not overlap."""
    if type(part) not in (nn.Conv2d, nn.Conv3d) or part.kernel_size != part.stride or part.groups != 1:
        return False
    return part.padding in ("valid", (0,) * len(part.kernel_size)) and set(part.dilation) == {1}
