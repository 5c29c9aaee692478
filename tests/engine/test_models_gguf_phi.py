"""GGUF files of Phi-3 and Phi-MoE as llama.cpp writes them: fused tensors, and longrope's factors as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.gguf_decoder import PHI_MOE_ATTENTION
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.test_models_gguf_experts import named
from tests.engine.tiny_models import LONGROPE, OURS, chunked_logits, family, oracle_logits, save_tiny, tokens_for
from tests.gguf_files import finish

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
ORIGINAL = 32
"""Original length of the tiny models with longrope, in tokens; they extend it to 128."""
STRETCHED = LONGROPE | {"original_max_position_embeddings": ORIGINAL}
PHI_MOE = STRETCHED | {
    "short_factor": LONGROPE["long_factor"],  # transformers' Phi-MoE takes these at any length
    "short_mscale": PHI_MOE_ATTENTION,
    "long_mscale": PHI_MOE_ATTENTION,
}
CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "phi3": ("phi3", OURS["phi3"]),
    "phi3-window-partial": ("phi3", OURS["phi3-window-partial"]),
    "phi3-long": (
        "phi3",
        lambda: family(
            "Phi3Config", pad_token_id=0, rope_parameters=STRETCHED, original_max_position_embeddings=ORIGINAL
        ),
    ),
    "phi-moe": (
        "phimoe",
        lambda: family(
            "PhimoeConfig",
            num_local_experts=6,
            lm_head_bias=True,
            attention_bias=True,
            rope_parameters=PHI_MOE,
        ),
    ),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


def header(config: Any) -> dict[str, Any]:
    """The fields that the converter writes beyond those that all files have."""
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    fields = {
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if "long_factor" in rope:
        scale = config.max_position_embeddings / original
        fields["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    if hasattr(config, "num_local_experts"):
        fields |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    return fields


def write(path: Path, directory: Path, name: str, kind: gguf.GGMLQuantizationType = Kind.F32, **changed: Any) -> Path:
    """Write the file of a tiny model. changed: fields of the header, None for one that it lacks, or factors."""
    architecture, made = CONFIGS[name]
    config = made()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (header(config) | changed).items():
        if value is not None and not key.endswith("_factors"):
            add = {float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{architecture}.{key}", value)
    for tensor, data in named(load_file(directory / "model.safetensors"), architecture, config.num_hidden_layers):
        values = data.float().numpy()
        fits = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "_inp" not in tensor
        stored = kind if fits else Kind.F32
        writer.add_tensor(tensor, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    for which in ("long", "short"):
        factors = changed.get(f"{which}_factors", config.rope_parameters.get(f"{which}_factor"))
        if factors:
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(factors, np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """At lengths up to the original one with the short factors, and beyond it with the long ones."""
    save_tiny(CONFIGS[name][1](), tmp_path / "hf")
    path = write(tmp_path / "a.gguf", tmp_path / "hf", name)
    assert implementation_of(resolve(str(path))).path == OWN
    for length in (ORIGINAL, 60):
        model = load(path, max_model_len=0 if length > ORIGINAL else ORIGINAL)
        tokens = tokens_for(length)
        found = chunked_logits(model, tokens, [20, length - 20])
        torch.testing.assert_close(found, oracle_logits(tmp_path / "hf", tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("name", ["phi3-long", "phi-moe"])
def test_codes_run_as_stored(name: str, tmp_path: Path) -> None:
    save_tiny(CONFIGS[name][1](), tmp_path / "hf")
    path = write(tmp_path / "q.gguf", tmp_path / "hf", name, Kind.Q8_0)
    model = load(path, CpuOps(1), torch.bfloat16, quantization="auto")
    assert model.info.revision.endswith("+Q8_0+longrope")
    for layer in model.parameters.layers:
        assert getattr(layer.attention.qkv, "kinds", frozenset()) == {"Q8_0"}  # type: ignore[union-attr]
    tokens = tokens_for(60)
    found = [chunked_logits(model, tokens, [20, 40]).flatten(), oracle_logits(tmp_path / "hf", tokens).flatten()]
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.98


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rope.scaling.original_context_length": None}, "longrope needs the original context length"),
        ({"rope.scaling.original_context_length": 0}, "longrope needs the original context length"),
        ({"short_factors": [1.0, 2.0]}, r"rope_factors_short\.weight has shape \(2,\), the config says \(8,\)"),
    ],
)
def test_factors_that_do_not_fit(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_tiny(CONFIGS["phi3-long"][1](), tmp_path / "hf")
    path = write(tmp_path / "a.gguf", tmp_path / "hf", "phi3-long", **changed)
    with pytest.raises(ConfigError, match=told):
        load(path)
