"""What the kernel benchmark times: one operation at one size, in two forms that must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

COLD_BYTES = 256 << 20
MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """One operation at one size. Forms take a layer number below `layers` and return what must agree between them;
    moved and work are bytes and floating point operations of one layer."""

    title: str
    ours: Callable[[int], torch.Tensor]
    peer: Callable[[int], torch.Tensor]
    layers: int
    moved: int
    work: int = 0


def layers_for(moved: int) -> int:
    """Layers that together exceed any L2 cache of today, MAX_LAYERS at most."""
    return max(1, min(MAX_LAYERS, -(-COLD_BYTES // moved)))
