"""LoRA adapters in shards: each rank has its part of a layer's outputs or inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch

from kvferry.engine.ranks.group import Group
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.lora import Adapter, Layers

BY_INPUT = ("o", "down")
"""Dense layers of whose inputs a rank has a part: see `engine.ranks.weights.INPUTS`."""


@dataclass(slots=True, eq=False)
class ShardedAdapter(Adapter):
    """The first rank's. others: the layers of each other one, in the host's memory, until they have them."""

    others: tuple[Layers, ...] = ()

    def release(self) -> None:
        self.layers = self.others = ()


def joined_layers(layers: Layers, group: Group, device: torch.device) -> Layers:
    """A rank's, on its device: what the first matrix makes of inputs is added up where each rank has some of them."""
    return tuple(
        {
            name: tuple(replace(part.to(device), joined=group.sum if name in BY_INPUT else None) for part in parts)
            for name, parts in layer.items()
        }
        for layer in layers
    )


class Numbers:
    """Numbering of the adapters on other ranks; owned by the engine thread.

    take: sends an adapter to the ranks under its number; drop: tells them to free it. take: tells them of one, by its
    number; drop: that nobody computes with it any more."""

    def __init__(self, take: Callable[[int, ShardedAdapter], None], drop: Callable[[int], None]) -> None:
        self._take, self._drop = take, drop
        self._next, self._known = count(), dict[Adapter, int]()

    def __getitem__(self, adapter: Adapter) -> int:
        return self._known[adapter]

    def bring(self, plan: BatchPlan) -> None:
        """Before a step: the others get what it needs, and let go of what was released."""
        for adapter in [each for each in self._known if not each.layers]:
            self._drop(self._known.pop(adapter))
        for adapter in (each.adapter for each in plan.adapted):
            if adapter not in self._known:
                assert isinstance(adapter, ShardedAdapter)
                self._known[adapter] = number = next(self._next)
                self._take(number, adapter)
                adapter.others = ()
