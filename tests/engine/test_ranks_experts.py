"""Ranks that divide a mixture's experts, each whole: equal logits, equal blocks, and who has which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import Experts
from kvferry.protocol.errors import ConfigError
from tests.engine.joined_ranks import Pooled, Threads, expect_equal, joined_ranks, whole
from tests.engine.test_models_gguf import Kind as Stored
from tests.engine.test_models_gguf import experts_of, write_gguf
from tests.engine.test_models_stacked import in_mxfp4
from tests.engine.tiny_models import OURS, chunked_logits, family, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = (
    "qwen2-moe",
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "gpt-oss",
    "deepseek",
    "glm4-moe",
    "minimax",
    "ernie",
    "granite-moe",
    "llama4",
    "hunyuan-moe",
    "phi-moe",
)
MIXTURES = [name for name in OURS if name.startswith(KINDS)]
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def divided(name: str, path: Path) -> Path:
    """A model of four K/V heads."""
    config = OURS[name]()
    config.num_key_value_heads = 4
    save_tiny(config, path)
    return path


def held(ranks: Threads) -> list[list[int]]:
    """Which experts each rank has in the last layer."""
    found = []
    for decoder in ranks.decoders:
        mlp = decoder.parameters.layers[-1].mlp
        assert isinstance(mlp, Experts)
        found.append([index for index, each in enumerate(mlp.each) if each is not None])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_and_blocks_are_those_of_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    """The tiny mixtures have 3, 4, 6 and 8 experts."""
    path = divided(name, tmp_path)
    tokens = tokens_for(40, 3)
    with joined_ranks(path, ranks, whole_experts=True) as joined:
        cache = expect_equal(joined, whole(path))
        torch.testing.assert_close(cache.step({"c": tokens})[0], oracle_logits(path, tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen3-moe", [[0, 1], [2], [3, 4], [5]]), ("mixtral-window", [[0], [1], [2], []])],
)
def test_each_expert_is_one_ranks(name: str, wanted: list[list[int]], tmp_path: Path) -> None:
    """The first one, whose forms of weights stand for the node's, has some however few there are."""
    assert held(Threads(divided(name, tmp_path), 4, whole_experts=True)) == wanted


def test_what_all_tokens_pass_through_stays_divided_by_width(tmp_path: Path) -> None:
    ranks = Threads(divided("deepseek-v3", tmp_path), 2, whole_experts=True)
    widths = {
        decoder.parameters.layers[-1].mlp.shared.down.rows(torch.tensor([0])).shape[1] for decoder in ranks.decoders
    }
    assert widths == {32}


@needs_extension
def test_codes_that_widths_would_cut_run_as_stored(tmp_path: Path) -> None:
    """Experts of 96 inputs in runs of 32, which no two ranks can divide."""
    (tmp_path / "plain").mkdir()
    path = in_mxfp4(divided("gpt-oss", tmp_path / "plain"))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": "auto"}
    with pytest.raises(ConfigError, match=r"cuts blocks of 32 inputs of .*experts\.0\.down_proj"):
        Threads(path, 2, ops=CpuOps, **options)
    alone = whole(path, CpuOps, **options)
    with joined_ranks(path, 4, ops=CpuOps, whole_experts=True, **options) as joined:
        assert joined.model.info.revision == alone.info.revision
        expect_equal(joined, alone, 0.1)


@needs_extension
@pytest.mark.parametrize(("architecture", "name"), [("llama", "mixtral"), ("qwen3moe", "qwen3-moe")])
def test_experts_of_a_gguf_run_as_stored(architecture: str, name: str, tmp_path: Path) -> None:
    config = OURS[name]()
    config.intermediate_size = 96
    config.moe_intermediate_size = 96
    save_tiny(config, tmp_path / "hf")
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", architecture, kind=Stored.Q8_0, fields=experts_of(config))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": "auto"}
    with pytest.raises(ConfigError, match=r"cuts blocks of 32 inputs of .*experts"):
        Threads(path, 2, ops=CpuOps, **options)
    with joined_ranks(path, 2, whole_experts=True) as joined:
        expect_equal(joined, whole(path))
    tokens, alone = tokens_for(40), whole(path, CpuOps, **options)
    exact = chunked_logits(whole(path), tokens, [40])
    with joined_ranks(path, 2, ops=CpuOps, whole_experts=True, **options) as joined:
        assert joined.model.info.revision == alone.info.revision
        assert joined.model.info.revision.endswith("+Q8_0")
        (found,) = Pooled(joined).step({"a": tokens})
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.998, "inputs are rounded, too"


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    with pytest.raises(ConfigError, match="enable_expert_parallel: llama has no experts") as raised:
        Threads(tmp_path, 2, whole_experts=True)
    assert raised.value.param == "enable_expert_parallel"
