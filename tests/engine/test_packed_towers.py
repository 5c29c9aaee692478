"""Vision towers whose layers are packed, against the same modules in PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvferry.engine.media import tower_attention
from kvferry.engine.media.packed_tower import ActivationModule, PatchModule, pack_tower
from kvferry.engine.models.hf_dense import DenseModule
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.cpu.full_attention import full_attention
from tests.engine.tiny_models import transformers

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


@pytest.mark.parametrize(("hidden", "native"), [(64, True), (48, False)])
@torch.inference_mode()
def test_the_kernels_attend_within_a_tower(hidden: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two images by itself, with a number of patches that fills no panel; a head of 24 stays PyTorch's."""
    torch.manual_seed(4)
    sizes = {"hidden_size": hidden, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=35, patch_size=5, hidden_act="gelu_pytorch_tanh")
    tower = transformers.SiglipVisionModel(config).eval()
    for parameter in tower.parameters():
        parameter.normal_(0.0, 0.2)
    pixels = torch.randn(2, 3, 35, 35)
    wanted = tower(pixels).last_hidden_state
    calls = []

    def attended(ops: CpuOps, *given: Any) -> torch.Tensor:
        calls.append(given)
        return full_attention(ops, *given)

    monkeypatch.setattr(tower_attention, "full_attention", attended)
    packed = copy.deepcopy(tower).bfloat16()
    pack_tower(packed)
    assert sum(type(part) is ActivationModule for part in packed.modules()) >= 2
    found = packed(pixels.bfloat16()).last_hidden_state.float()
    assert len(calls) == (2 if native else 0)
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.999
