"""Interface of collective operations between ranks: sum and gather.

Implementations: `shared_group` (memory that all ranks share, as they do their pool), `device_group` (torch.distributed;
each rank has a device, and a pool, of its own).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """One rank's way to the others.

    All ranks call the same operations, with as many numbers, in the same order. Raises where another rank is gone;
    after that the group is of no use.

    rank   which one this is, of `ranks`
    apart  each rank has a pool of its own, of its heads; otherwise all share one, which is whole
    """

    rank: int
    ranks: int
    apart: bool

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x, float32 and contiguous, plus what the others bring, in place; the same bits on all ranks."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather float32 x of all ranks: [ranks, *x.shape]."""

    def written(self) -> None:
        """Returns once what all heads share of a layer can be read: where the pool is shared, the first rank alone
        writes it."""
