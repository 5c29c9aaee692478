"""GGUF files of Gemma 1 to 3, Granite 3, OLMo 2 and 3, GLM-4 (0414), Phi 2 and Qwen-VL's text, against checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvferry.engine.models.gguf_config import parse_gguf
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.model_files.gguf import GGUFFile, read_gguf
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from tests.engine.test_models_gguf_dense import load, rope_of, same_logits, write
from tests.engine.tiny_dense_families import DENSE
from tests.engine.tiny_models import GEMMA2, GEMMA3, GRANITE, OURS, chunked_logits, family, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
OF_HEAD = {"query_pre_attn_scalar": 16}
"""The scale of scores that llama.cpp takes for all but the largest models."""
GEMMA3_LAYERS = {name: value for name, value in GEMMA3.items() if name != "layer_types"} | {"num_hidden_layers": 7}

CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gemma": ("gemma", OURS["gemma"]),
    "gemma2": (
        "gemma2",
        lambda: family("Gemma2Config", num_hidden_layers=4, **GEMMA2 | OF_HEAD | {"tie_word_embeddings": True}),
    ),
    "gemma3": ("gemma3", lambda: family("Gemma3TextConfig", **GEMMA3_LAYERS | OF_HEAD | {"tie_word_embeddings": True})),
    "gemma3-linear": (
        "gemma3",
        lambda: family(
            "Gemma3TextConfig",
            num_hidden_layers=4,
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            **GEMMA3 | OF_HEAD,
        ),
    ),
    "granite": ("granite", lambda: family("GraniteConfig", tie_word_embeddings=True, **GRANITE)),
    "olmo2": ("olmo2", OURS["olmo2"]),
    "olmo3": ("olmo2", OURS["olmo3"]),
    "glm4": ("glm4", OURS["glm4"]),
    "phi": ("phi2", DENSE["phi"]),
    "qwen2-vl": ("qwen2vl", OURS["qwen2"]),
    "qwen3-vl": ("qwen3vl", OURS["qwen3"]),
}
"""Architecture and checkpoint by name; what Qwen-VL computes of text is Qwen's."""


def fields_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return what the converter writes for these families alone."""
    rope, fields = rope_of(config), {}
    if architecture == "gemma2":
        fields |= {
            f"{name}_logit_softcapping": getattr(config, f"{name}_logit_softcapping") for name in ("attn", "final")
        }
    if architecture in ("gemma2", "gemma3") or (architecture == "olmo2" and getattr(config, "sliding_window", None)):
        fields["attention.sliding_window"] = config.sliding_window
    if (architecture == "gemma3" and rope["rope_type"] == "linear") or (
        "attention.sliding_window" in fields and architecture == "olmo2"
    ):
        fields["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config.layer_types]
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "linear":
        fields["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if rope["rope_type"] == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture == "granite":
        named = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
        named |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
        fields |= {key: getattr(config, name) for name, key in named.items()}
    return fields


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Save a checkpoint and its file; return both paths."""

    def save(name: str, **options: Any) -> tuple[Path, Path]:
        architecture, build = CONFIGS[name]
        config = build()
        save_tiny(config, tmp_path / "hf")
        fields = fields_of(config, architecture)
        return tmp_path / "hf", write(tmp_path / "tiny.gguf", tmp_path / "hf", architecture, fields=fields, **options)

    return save


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_has_the_logits_of_its_directory(name: str, saved: Callable[..., tuple[Path, Path]]) -> None:
    directory, path = saved(name)
    same_logits(load(path), directory)
    of_file, of_checkpoint = model_needs(resolve(str(path))), model_needs(resolve(str(directory)))
    assert of_file.parameters == of_checkpoint.parameters
    assert of_file.kv_bytes("bfloat16") == of_checkpoint.kv_bytes("bfloat16")


def test_phi_2_in_one_tensor(saved: Callable[..., tuple[Path, Path]]) -> None:
    """As files of Phi's first checkpoints have q, k and v."""
    directory, path = saved("phi", fused=True)
    same_logits(load(path), directory)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite", "olmo2", "glm4", "phi"])
def test_block_formats_run_as_stored(name: str, saved: Callable[..., tuple[Path, Path]]) -> None:
    directory, path = saved(name, kind=gguf.GGMLQuantizationType.Q8_0)
    model = load(path, CpuOps(1), torch.bfloat16, quantization="auto")
    assert "Q8_0" in model.info.revision
    tokens = tokens_for(40)
    found, wanted = (chunked_logits(each, tokens, [23, 17]).flatten() for each in (model, load(directory)))
    assert torch.corrcoef(torch.stack((found, wanted)))[0, 1] > 0.98


@pytest.fixture
def gemma3(saved: Callable[..., tuple[Path, Path]]) -> GGUFFile:
    return read_gguf(saved("gemma3")[1])


@pytest.mark.parametrize(("layers", "scale"), [(62, 16), (48, 16), (7, 16)])
def test_scores_of_the_largest_gemma_are_scaled_by_the_hidden_size(layers: int, scale: float, gemma3: GGUFFile) -> None:
    wide = gemma3.metadata | {"gemma3.block_count": layers, "gemma3.embedding_length": 96}
    config = parse_gguf(replace(gemma3, metadata=wide))
    assert config.factors.attention == (24 if layers == 62 else scale) ** -0.5


@pytest.mark.parametrize(("given", "windows"), [(None, 6), (3, 5), ([True, False] * 3 + [True], 4)])
def test_which_layers_of_gemma_3_have_a_window(given: Any, windows: int, gemma3: GGUFFile) -> None:
    """Every sixth has none, unless the header says otherwise."""
    marked = gemma3.metadata | ({} if given is None else {"gemma3.attention.sliding_window_pattern": given})
    assert sum(each == 9 for each in parse_gguf(replace(gemma3, metadata=marked)).windows) == windows


def test_a_gemma_3_without_windows(gemma3: GGUFFile) -> None:
    metadata = {name: value for name, value in gemma3.metadata.items() if "sliding" not in name}
    assert parse_gguf(replace(gemma3, metadata=metadata)).windows == (0,) * 7
