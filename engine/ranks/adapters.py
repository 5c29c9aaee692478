"""LoRA adapters of a sharded model: each rank's part of a layer's outputs or inputs, and adapters' numbers on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch

from kvferry.engine.ranks.group import Group
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.lora import Adapter, Layers

BY_INPUT = ("o", "down")
"""Dense layers that are sharded by inputs: see `engine.ranks.weights.INPUTS`."""


@dataclass(slots=True, eq=False)
class ShardedAdapter(Adapter):
    """Adapter on the first rank. others: layers of the other ranks, in host memory until those have them."""

    others: tuple[Layers, ...] = ()

    def release(self) -> None:
        """Free the weights."""
        self.layers = self.others = ()


def joined_layers(layers: Layers, group: Group, device: torch.device) -> Layers:
    """Return a rank's layers on its device; products of sharded inputs are summed over ranks."""
    return tuple(
        {
            name: tuple(replace(part.to(device), joined=group.sum if name in BY_INPUT else None) for part in parts)
            for name, parts in layer.items()
        }
        for layer in layers
    )


class Numbers:
    """Numbering of the adapters on other ranks. Owned by the engine thread.

    take: sends an adapter to the other ranks under its number. drop: sends them the message to free it."""

    def __init__(self, take: Callable[[int, ShardedAdapter], None], drop: Callable[[int], None]) -> None:
        self._take, self._drop = take, drop
        self._next, self._known = count(), dict[Adapter, int]()

    def __getitem__(self, adapter: Adapter) -> int:
        return self._known[adapter]

    def bring(self, plan: BatchPlan) -> None:
        """Send the other ranks the adapters that the step needs, and free released ones. Called before a step."""
        for adapter in [each for each in self._known if not each.layers]:
            self._drop(self._known.pop(adapter))
        for adapter in (each.adapter for each in plan.adapted):
            if adapter not in self._known:
                assert isinstance(adapter, ShardedAdapter)
                self._known[adapter] = number = next(self._next)
                self._take(number, adapter)
                adapter.others = ()
