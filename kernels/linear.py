"""Interfaces of dense layers that a backend makes (Linear, StoredLinear, LinearOfHeads), and Scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Linear(Protocol):
    """Dense layer of weight [out, in] with an optional bias [out]."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return x @ weight.T + bias of x [n, in], in `dtype` (float32, or x's own by default)."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [n, in] of the weight for `ids`, int64 [n] (an embedding lookup)."""


class StoredLinear(Linear, Protocol):
    """Dense layer over weights that run as stored.

    kinds: their forms; other forms of the same weights give other numbers."""

    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Dense layer whose results are multiplied by a factor that its stored codes cannot absorb."""

    own: StoredLinear
    factor: float

    @property
    def kinds(self) -> frozenset[str]:
        """Return the forms of the weights."""
        return self.own.kinds

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.own(x, dtype).mul_(self.factor)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the scaled weight."""
        return self.own.rows(ids) * self.factor


class LinearOfHeads(Protocol):
    """Dense layer for each head, of weights [heads, out, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, heads, out] for x [n, heads, in]."""
