"""Ranks whose dense layers are quantised as they are loaded: to the values that one process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.layers import Summed
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import Gated, Gqa
from kvferry.kernels.linear import Linear
from kvferry.protocol.errors import ConfigError
from tests.engine.joined_ranks import Threads, expect_equal, joined_ranks, whole
from tests.engine.tiny_models import OURS, family, save_tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
]
INT8: dict[str, Any] = {"ops": CpuOps, "dtype": torch.bfloat16, "quantization": "int8"}
GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125}


def weight_of(linear: Linear, outputs: int) -> torch.Tensor:
    return linear.rows(torch.arange(outputs))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("name", "settings"), [("LlamaConfig", {}), ("GraniteConfig", GRANITE)])
def test_each_has_its_part_of_the_whole_matrix(
    name: str, settings: dict[str, Any], apart: bool, tmp_path: Path
) -> None:
    save_tiny(family(name, head_dim=32, intermediate_size=128, **settings), tmp_path)
    model = whole(tmp_path, **INT8)
    assert isinstance(model, Decoder)
    hidden = model.config.hidden_size
    with joined_ranks(tmp_path, 2, apart=apart, **INT8) as ranks:
        for index, layer in enumerate(model.parameters.layers):
            theirs = [each.parameters.layers[index] for each in ranks.decoders]
            assert isinstance(layer.attention, Gqa)
            assert isinstance(layer.mlp, Gated)
            for linear, parts in (
                (layer.attention.o, [each.attention.o for each in theirs]),
                (layer.mlp.down, [each.mlp.down for each in theirs]),
            ):
                assert all(isinstance(each, Summed) for each in parts)
                found = torch.cat([weight_of(each, hidden) for each in parts], 1)
                assert torch.equal(found, weight_of(linear, hidden))
        assert ranks.model.info == model.info
        assert model.info.revision.endswith("+INT8")
        expect_equal(ranks, model, 0.1)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_so_have_experts(whole_experts: bool, tmp_path: Path) -> None:
    config = OURS["qwen3-moe"]()
    config.moe_intermediate_size, config.intermediate_size = 64, 128
    save_tiny(config, tmp_path)
    with joined_ranks(tmp_path, 2, whole_experts=whole_experts, **INT8) as ranks:
        expect_equal(ranks, whole(tmp_path, **INT8), 0.1)


def test_runs_of_inputs_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    """Their activations would have other scales."""
    save_tiny(family("LlamaConfig", head_dim=32, intermediate_size=96), tmp_path)
    with pytest.raises(ConfigError, match=r"2 cuts blocks of 32 inputs of model\.layers\.0\.mlp\.down_proj\.weight"):
        Threads(tmp_path, 2, **INT8)
