"""GGUF files of Gemma 3n and Gemma 4 as llama.cpp's converter writes them, against their checkpoints."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.gguf_config import parse_gguf
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.gguf import GGUFFile, read_gguf
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import (
    GEMMA3N,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_LARGE,
    chunked_logits,
    family,
    save_tiny,
    tokens_for,
    transformers,
)
from tests.gguf_files import finish, gguf_name

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
pytestmark = pytest.mark.usefixtures("one_thread")
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
OWN = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.correct_output_scale": "altup_correct_scale",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
CONFIGS = {
    "gemma3n": lambda: family("Gemma3nTextConfig", tie_word_embeddings=True, **GEMMA3N | {"intermediate_size": 96}),
    "gemma4": lambda: family("Gemma4TextConfig", tie_word_embeddings=True, **GEMMA4),
    "gemma4-large": lambda: family("Gemma4TextConfig", **GEMMA4_LARGE),
    "gemma4-experts": lambda: family(
        "Gemma4TextConfig", **GEMMA4_LARGE, **GEMMA4_EXPERTS | {"moe_intermediate_size": 32}
    ),
}


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """By their names in a file; the projections between AltUp's streams are one tensor each."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {"altup_proj.weight": [], "altup_unembd_proj.weight": []}
    for name, value in model.state_dict().items():
        data = value.float().numpy()
        if "altup_projections" in name or "altup_unembed_projections" in name:
            stacks["altup_proj.weight" if "altup_projections" in name else "altup_unembd_proj.weight"].append(data)
            continue
        scale = next((own for ending, own in SCALES.items() if name.endswith(ending)), None)
        if scale is not None:
            found[f"blk.{name.split('.')[2]}.{scale}"] = data
            continue
        named = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        found[gguf_name(named, OWN)] = data
    return found | {name: np.stack(parts) for name, parts in stacks.items() if parts}


def written(path: Path, directory: Path, kind: gguf.GGMLQuantizationType = Kind.F32) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    gemma4 = config.model_type == "gemma4_text"
    arch = "gemma4" if gemma4 else "gemma3n"
    writer = gguf.GGUFWriter(str(path), arch)
    sliding = [each == "sliding_attention" for each in config.layer_types]
    ropes, shared = config.rope_parameters, config.num_kv_shared_layers
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_float32(f"{arch}.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_array(f"{arch}.attention.sliding_window_pattern", sliding)
    writer.add_uint32(f"{arch}.attention.shared_kv_layers", shared)
    writer.add_uint32(f"{arch}.embedding_length_per_layer_input", config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        writer.add_float32(f"{arch}.final_logit_softcapping", config.final_logit_softcapping)
    tensors = tensors_of(model)
    if gemma4:
        each = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
        full, local = each[sliding.index(False)], each[sliding.index(True)]
        inner = [model.model.layers[i].mlp.intermediate_size for i in range(config.num_hidden_layers)]
        writer.add_feed_forward_length(inner)
        heads = [own.num_key_value_heads for own in each]
        writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
        for name, dim in (("", full.head_dim), ("_swa", local.head_dim)):
            writer.add_uint32(f"{arch}.attention.key_length{name}", dim)
            writer.add_uint32(f"{arch}.attention.value_length{name}", dim)
            writer.add_uint32(f"{arch}.rope.dimension_count{name}", dim)
        turning = int(full.head_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
        tensors["rope_freqs.weight"] = np.array(
            [1.0] * turning + [1e30] * (full.head_dim // 2 - turning), dtype=np.float32
        )
        if config.enable_moe_block:
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.top_k_experts)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size[0])
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_uint32(f"{arch}.altup.active_idx", config.altup_active_idx)
        writer.add_uint32(f"{arch}.altup.num_inputs", config.altup_num_inputs)
        scales = [NormalDist().inv_cdf(s) if s else -np.inf for s in config.activation_sparsity_pattern]
        writer.add_array(f"{arch}.activation_sparsity_scale", [float(np.float32(s)) for s in scales])
    for name, data in tensors.items():
        if config.tie_word_embeddings and name == "output.weight":
            continue
        plain = re.search(r"altup|gate_inp|norm", name) or data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
        stored = Kind.F32 if data.ndim == 1 or plain else kind
        writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
    finish(writer)
    return path


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_tiny(CONFIGS[request.param](), tmp_path / "hf")
    return tmp_path / "hf"


def test_a_file_is_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    path, tokens = written(tmp_path / "model.gguf", checkpoint), tokens_for(40)
    model, whole = load(path), load(checkpoint, impl="kvferry")
    assert model.info.layers == whole.info.layers
    wanted = chunked_logits(whole, tokens, [40])
    torch.testing.assert_close(chunked_logits(model, tokens, [23, 17]), wanted, rtol=2e-4, atol=2e-4)
    of_file, of_checkpoint = model_needs(resolve(str(path))), model_needs(resolve(str(checkpoint)))
    assert of_file.parameters == of_checkpoint.parameters
    assert of_file.dense.active == of_checkpoint.dense.active
    assert of_file.kv_bytes("bfloat16") == of_checkpoint.kv_bytes("bfloat16")


@needs_extension
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_a_file_runs_as_stored(kind: gguf.GGMLQuantizationType, checkpoint: Path, tmp_path: Path) -> None:
    path, tokens = written(tmp_path / "model.gguf", checkpoint, kind), tokens_for(40)
    stored = load(path, CpuOps(1), torch.bfloat16, quantization="auto")
    assert kind.name in stored.info.revision.split("+")
    exact = load(path)
    logits = [chunked_logits(model, tokens, [23, 17]).flatten() for model in (stored, exact)]
    assert torch.corrcoef(torch.stack(logits))[0, 1] > 0.97 - 0.1 * ("ffn_down_exps.scale" in str(path.read_bytes()))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.sliding_window_pattern", [True, False], "sliding_window_pattern must have 6 entries"),
        ("attention.sliding_window_pattern", "all", "sliding_window_pattern must have 6 entries"),
        ("attention.shared_kv_layers", "two", "attention.shared_kv_layers must be a number of at least 0, got 'two'"),
        ("attention.shared_kv_layers", 6, "num_kv_shared_layers is 6"),
        ("embedding_length_per_layer_input", math.nan, "embedding_length_per_layer_input must be a number"),
        ("attention.head_count_kv", [2], "attention.head_count_kv must have 6 entries, got 1"),
        ("block_count", None, "block_count"),
        ("feed_forward_length", [96, 96], "intermediate_size has 2 values for 6 layers"),
    ],
)
def test_a_header_that_makes_no_sense_is_named(key: str, value: object, words: str, gemma4: GGUFFile) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_gguf(replace(gemma4, metadata=gemma4.metadata | {f"gemma4.{key}": value}))


@pytest.fixture
def gemma4(tmp_path: Path) -> GGUFFile:
    save_tiny(CONFIGS["gemma4"](), tmp_path / "hf")
    return read_gguf(written(tmp_path / "model.gguf", tmp_path / "hf"))
