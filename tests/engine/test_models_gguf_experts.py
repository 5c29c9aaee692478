"""GGUF files of mixtures of experts, written as llama.cpp's converter does: its own table names their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from tests.engine.test_models_gguf import CPU, Kind, interleaved, load, same_logits
from tests.engine.tiny_models import OURS, chunked_logits, save_tiny, tokens_for
from tests.gguf_files import finish

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
HALVES = {
    "block_sparse_moe.input_linear": "ffn_{}_exps",
    "shared_mlp.input_linear": "ffn_{}_shexp",
    "feed_forward.experts.gate_up_proj": "ffn_{}_exps",
}
"""Tensors of Granite and Llama 4 that the converter splits into gate and up."""


def stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with those of a layer's experts as one."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])] or [0]):
        if found := EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}.weight", []).append(tensor)
        else:
            yield name, tensor
    for name, each in experts.items():
        yield name, torch.stack(each)


def named(tensors: dict[str, torch.Tensor], architecture: str, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    numbers = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], layers)
    for name, tensor in stacked(tensors):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("experts.down_proj") or name.endswith("experts.gate_up_proj"):
            name, tensor = name.replace("down_proj", "down_proj.weight"), tensor.transpose(-1, -2)
        half = next((made for part, made in HALVES.items() if part in name), None)
        if half is not None:
            layer = name.split(".")[2]
            for part, each in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                yield f"blk.{layer}.{half.format(part)}.weight", each
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, tensor


def write(
    path: Path, directory: Path, architecture: str, config: Any, fields: dict[str, Any], kind: Kind = Kind.F32
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    further = fields.get("nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "rope.freq_base" not in fields:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for key, value in fields.items():
        add = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, tensor in named(load_file(directory / "model.safetensors"), architecture, config.num_hidden_layers):
        data = tensor.float().squeeze().numpy()
        if architecture == "granitemoe" and (".attn_q." in name or ".attn_k." in name):
            data = interleaved(data, config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)
        fits = data.ndim > 1 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "_inp" not in name
        stored = kind if fits else Kind.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(data), stored), raw_dtype=stored)
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + further):
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.ones((8, 32, 64), np.float32))
    finish(writer)
    return path


def glm(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.head_dim // 2,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "nextn_predict_layers": 1,
    }


def minimax(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size, "rope.dimension_count": config.head_dim // 2}


def qwen2(config: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def ernie(config: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
    }


def granite(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def exaone(config: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "nextn_predict_layers": 1,
    }


def hunyuan(config: Any) -> dict[str, Any]:
    """The converter stretches the base of the rotation as alpha says."""
    alpha, dim = config.rope_parameters["alpha"], config.head_dim
    return {
        "rope.freq_base": config.rope_parameters["rope_theta"] * alpha ** (dim / (dim - 2)),
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def llama4(config: Any) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


FILES = {
    "exaone-moe": ("exaone-moe", exaone),
    "hunyuan-moe": ("hunyuan-moe", hunyuan),
    "llama4": ("llama4", llama4),
    "llama4-dense-between": ("llama4", llama4),
    "glm4-moe-plain": ("glm4moe", glm),
    "minimax-m2": ("minimax-m2", minimax),
    "qwen2-moe-unbiased": ("qwen2moe", qwen2),
    "ernie-moe": ("ernie4_5-moe", ernie),
    "granite-moe": ("granitemoe", granite),
    "granite-moe-shared": ("granitemoe", granite),
}
"""Of tiny models: the architecture of their files, and the fields that those have beyond what all have."""


@pytest.fixture(params=FILES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Path]:
    config = OURS[request.param]()
    if request.param == "qwen2-moe-unbiased":
        config.mlp_only_layers = []  # files have no field for them
    if request.param == "exaone-moe":
        config.layer_types = [*["sliding_attention"] * 3, "full_attention"]
    if request.param.startswith("llama4"):  # nor for these, which all models share
        config.attention_chunk_size, config.floor_scale, config.attn_scale = 8192, 8192, 0.1
        config.no_rope_layers, config.layer_types = [1, 1, 1, 0], [*["chunked_attention"] * 3, "full_attention"]
        config.use_qk_norm, config.rope_parameters = True, {"rope_type": "default", "rope_theta": 500.0}
    save_tiny(config, tmp_path / "hf")
    return request.param, config, tmp_path


def test_logits_equal_those_of_the_checkpoint(made: tuple[str, Any, Path]) -> None:
    name, config, path = made
    architecture, fields = FILES[name]
    file = write(path / "a.gguf", path / "hf", architecture, config, fields(config))
    assert implementation_of(resolve(str(file))).path == OWN
    model = load(file)
    same_logits(model, path / "hf")
    needs, wanted = model_needs(resolve(str(file))), model_needs(resolve(str(path / "hf")))
    assert needs.dense.weights == pytest.approx(wanted.dense.weights, abs=64 * 3)  # vectors that files flatten
    assert needs.dense.active == pytest.approx(wanted.dense.active, abs=64 * 3)
    assert (needs.layers, needs.experts, needs.own) == (wanted.layers, wanted.experts, True)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
def test_codes_run_as_stored(made: tuple[str, Any, Path]) -> None:
    name, config, path = made
    architecture, fields = FILES[name]
    file = write(path / "q.gguf", path / "hf", architecture, config, fields(config), Kind.Q8_0)
    model = load_model(resolve(str(file)), device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), quantization="auto")
    assert isinstance(model, Decoder)
    assert model.info.revision.endswith("+Q8_0")
    for layer in model.parameters.layers:
        assert getattr(layer.attention.o, "kinds", frozenset()) == {"Q8_0"}, "no factor makes a layer leave its codes"  # type: ignore[union-attr]
    tokens = tokens_for(40)
    found = [chunked_logits(each, tokens, [23, 17]).flatten() for each in (model, load(path / "hf"))]
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.98  # tokens on the brink choose other experts
