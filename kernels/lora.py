"""LoRA adapters (Hu et al. 2021) on a device: low-rank products that are added to dense layers for some tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank addition x @ down.T @ up.T to some outputs of a layer.

    down: [rank, in]. up: [outputs, rank], already scaled. first: index of the first of these outputs among those of a
    fused layer. joined: if x and down are a part of the inputs, sums float32 [n, rank] over all ranks."""

    down: torch.Tensor
    up: torch.Tensor
    first: int
    joined: Callable[[torch.Tensor], torch.Tensor] | None = None

    def to(self, device: torch.device) -> LowRank:
        """Return the addition on another device."""
        return LowRank(self.down.to(device), self.up.to(device), self.first, self.joined)

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, rank] for x [n, in], in its dtype; a sum over parts of the inputs is rounded once."""
        if self.joined is None:
            return F.linear(x, self.down)
        return self.joined(F.linear(x.float(), self.down.float())).to(x.dtype)


Layers = tuple[Mapping[str, tuple[LowRank, ...]], ...]
"""Additions of each decoder layer, by the name of the dense layer: qkv, o, gate_up, up (without a gate) or down."""


def on_device(layers: Layers, device: torch.device) -> Layers:
    """Copy an adapter's matrices to the device."""
    return tuple({name: tuple(part.to(device) for part in parts) for name, parts in each.items()} for each in layers)


@dataclass(slots=True, eq=False)
class Adapter:
    """Adapter of one decoder on a device. id: 32 hex digits of its content."""

    id: str
    layers: Layers

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        parts = [part for layer in self.layers for found in layer.values() for part in found]
        return sum(matrix.numel() * matrix.element_size() for part in parts for matrix in (part.down, part.up))

    def release(self) -> None:
        """Free the matrices of an adapter that nothing uses any more."""
        self.layers = ()


@dataclass(frozen=True, slots=True)
class Adapted:
    """Tokens of a batch, int64 [n], that are computed with an adapter."""

    adapter: Adapter
    tokens: torch.Tensor


def add_low_rank(y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, parts: Sequence[LowRank]) -> None:
    """See `Ops.add_low_rank`."""
    rows = x[tokens]
    for part in parts:
        outputs = y.narrow(1, part.first, len(part.up))
        outputs.index_add_(0, tokens, F.linear(part.narrow(rows), part.up))
