"""Interface of collective operations between ranks: sum and gather.

Implementations: `shared_group` (memory that all ranks share, as they do their pool), `device_group` (torch.distributed;
each rank has a device, and a pool, of its own).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """Collective operations of one rank.

    All ranks call the same operations, with the same shapes, in the same order. Operations raise if another rank is
    gone; the group is unusable afterwards.

    rank   this rank's number, below `ranks`
    apart  each rank has a pool of its own with its heads' K/V; otherwise all ranks share one whole pool
    """

    rank: int
    ranks: int
    apart: bool

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add the other ranks' x to x in place: float32, contiguous; the result is bit-identical on all ranks."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather float32 x of all ranks: [ranks, *x.shape]."""

    def written(self) -> None:
        """Return once the K/V that all heads of a layer share can be read.

        In a shared pool rank 0 alone writes it."""
