"""Vision towers whose layers are packed, against the same modules in PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvferry.engine.media.packed_tower import PatchModule, pack_tower
from kvferry.engine.models.hf_dense import DenseModule
from kvferry.kernels.cpu import instruction_set

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
]


class Tower(nn.Module):
    """Patches that do not fill the image, a layer of another's width, and attention that reads its own weights."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        kind: Any = nn.Conv2d if dims == 2 else nn.Conv3d
        self.patches = kind(3, 24, (3, 2, 4)[-dims:], (3, 2, 4)[-dims:])
        self.overlapping = nn.Conv1d(24, 24, 3, padding=1)
        self.up, self.attention = nn.Linear(24, 50, bias=False), nn.MultiheadAttention(50, 2, batch_first=True)

    @property
    def dtype(self) -> torch.dtype:
        return self.up.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.up.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.overlapping(self.patches(x).flatten(2)).transpose(1, 2))
        found: torch.Tensor = self.attention(x, x, x)[0]
        return found


@pytest.mark.parametrize("dims", [2, 3])
@torch.inference_mode()
def test_packed_layers_compute_the_same(dims: int) -> None:
    torch.manual_seed(3)
    tower = Tower(dims).eval()
    x = torch.randn(2, 3, *(7, 5, 13)[-dims:])
    wanted = tower(x)
    packed = copy.deepcopy(tower).bfloat16()
    pack_tower(packed)
    kinds = [type(part) for part in packed.modules()]
    assert kinds.count(PatchModule) == kinds.count(DenseModule) == 1
    torch.testing.assert_close(packed(x.bfloat16()).float(), wanted, rtol=0.03, atol=0.03)
    pack_tower(tower)
    assert type(tower.up) is nn.Linear, "in float32 it stays PyTorch's"
