"""What adapters add to dense layers: products with two narrow matrices (LoRA, Hu et al. 2021), for those tokens of a
batch that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds x @ down.T @ up.T to some outputs of a layer. down: [rank, in]; up: [outputs, rank], scaled already; first:
    the first of these outputs, which in a fused layer are some of many."""

    down: torch.Tensor
    up: torch.Tensor
    first: int


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter on a device, of one decoder. id: of its content, 32 hex digits. layers: for each layer of the decoder
    what is added to which dense layer, by its name: qkv, o, gate_up or down."""

    id: str
    layers: tuple[Mapping[str, tuple[LowRank, ...]], ...]

    @property
    def num_bytes(self) -> int:
        parts = [part for layer in self.layers for found in layer.values() for part in found]
        return sum(matrix.numel() * matrix.element_size() for part in parts for matrix in (part.down, part.up))

    def release(self) -> None:
        """Nobody computes with it any more: let go of its matrices, whoever may still know of it."""
        self.layers = ()


@dataclass(frozen=True, slots=True)
class Adapted:
    """The tokens of a batch, int64 [n], that are computed with an adapter."""

    adapter: Adapter
    tokens: torch.Tensor


def add_low_rank(y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, parts: Sequence[LowRank]) -> None:
    """See `Ops.add_low_rank`."""
    rows = x[tokens]
    for part in parts:
        outputs = y.narrow(1, part.first, len(part.up))
        outputs.index_add_(0, tokens, F.linear(F.linear(rows, part.down), part.up))
