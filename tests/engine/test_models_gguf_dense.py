"""GGUF files of the dense families as llama.cpp's converter writes them: names, order of rows, and header fields.

Names come from the gguf package's own map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.rope import RopeTables
from kvferry.engine.models.rope_config import RopeConfig
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_dense_families import DENSE
from tests.engine.tiny_models import chunked_logits, save_tiny, tokens_for, transformers
from tests.gguf_files import finish

ARCHITECTURES = {
    "glm": "chatglm",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "arcee": "arcee",
    "apertus": "apertus",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
NAMES = [
    *ARCHITECTURES,
    *("glm-plain", "ernie4_5-biased", "seed_oss-biased", "exaone4-types", "exaone4-full", "hunyuan_v1_dense-biased"),
    *("ministral3-tied", "arcee-biased", "apertus-biased", "nemotron-biased", "olmo-clipped", "stablelm-parallel"),
    *("stablelm-qk-norm", "starcoder2-plain"),
]
KINDS = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("arcee", "granite", "olmo", "mistral3")
OFFSET = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures whose files have norms that include their family's offset."""
LAYER_NORMS = ("nemotron", "olmo", "phi2", "stablelm", "starcoder2")
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


def converted(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors under their names in a file."""
    config, found = model.config, {}
    names = gguf.get_tensor_name_map(KINDS[architecture], config.num_hidden_layers)
    state = dict(model.state_dict())
    for part in "qk":
        for layer in range(config.num_hidden_layers):
            stem = f"model.layers.{layer}.self_attn.{part}_layernorm."
            rows = [state.pop(name) for name in list(state) if name.startswith(f"{stem}norms.")]
            if rows:
                state[f"{stem}weight"] = torch.stack(rows)
    for name, value in state.items():
        if ".act_fn." in name or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if architecture in OFFSET and name.endswith("norm.weight"):
            value = value + 1
        if architecture in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value.contiguous().numpy()
    return found


def rope_of(config: Any) -> dict[str, Any]:
    """Return the rotary settings of layers without a window."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def header(model: Any, architecture: str) -> dict[str, Any]:
    """Return the fields that only some architectures have."""
    config, rope = model.config, rope_of(model.config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields: dict[str, Any] = {"rope.freq_base": rope["rope_theta"]}
    if partial := rope.get("partial_rotary_factor"):
        fields["rope.dimension_count"] = int(head_dim * partial)
    if getattr(config, "sliding_window", None) and architecture == "exaone4":
        fields["attention.sliding_window"] = config.sliding_window
        fields["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config.layer_types]
    elif architecture == "mistral3" and config.sliding_window:
        fields["attention.sliding_window"] = config.sliding_window
    if architecture == "hunyuan-dense" and "alpha" in rope:
        fields["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        fields |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if architecture == "mistral3":
        fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        fields["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if clip := getattr(config, "clip_qkv", None):
        fields["attention.clamp_kqv"] = clip
    if architecture == "stablelm":
        fields["use_parallel_residual"] = config.use_parallel_residual
    return fields


def write(
    path: Path,
    directory: Path,
    architecture: str,
    fused: bool = False,
    kind: Any = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file. fused: q, k and v as one tensor. kind: of matrices. fields: further ones of the header."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if architecture in LAYER_NORMS:
        eps = [getattr(config, name, None) for name in ("norm_eps", "norm_epsilon", "layer_norm_eps")]
        writer.add_layer_norm_eps(next((each for each in eps if each), 1e-5))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "apertus":
        for name, add in (
            ("alpha_p", writer.add_xielu_alpha_p), ("alpha_n", writer.add_xielu_alpha_n),
            ("beta", writer.add_xielu_beta), ("eps", writer.add_xielu_eps),
        ):  # fmt: skip
            add([getattr(layer.mlp.act_fn, name).item() for layer in model.model.layers])
    for key, value in (header(model, architecture) | dict(fields or {})).items():
        kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        kinds.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    tensors = converted(model, architecture)
    if fused:
        for name in [each for each in tensors if ".attn_q." in each]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    if rope_of(config)["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = divisors(config)
    for name, data in tensors.items():
        stored = kind if kind is not None and data.ndim > 1 and "norm" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
    finish(writer)
    return path


def divisors(config: Any) -> np.ndarray:
    """Return what the converter makes of llama3's settings: factors of each wavelength."""
    rope, dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    plain = RopeConfig(rope["rope_theta"], dim, rope["original_max_position_embeddings"])
    tables = (RopeTables(each, 2, CPU) for each in (plain, replace(plain, kind="llama3", factor=rope["factor"])))
    before, after = (torch.atan2(each.sin, each.cos)[1] for each in tables)
    return (before / after).numpy()


def same_logits(model: Decoder, directory: Path, tolerance: float = 2e-4) -> None:
    tokens = tokens_for(40)
    wanted = chunked_logits(load(directory), tokens, [40])
    torch.testing.assert_close(chunked_logits(model, tokens, [23, 17]), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_logits_of_its_directory(name: str, tmp_path: Path) -> None:
    config = DENSE[name]()
    if name.startswith("starcoder2"):
        config.sliding_window = None  # the converter leaves it out, as llama.cpp does
    if name.startswith("glm"):
        config.head_dim = 16  # the converter takes the hidden size by heads
    save_tiny(config, tmp_path / "hf")
    model = load(write(tmp_path / "tiny.gguf", tmp_path / "hf", ARCHITECTURES[name.partition("-")[0]]))
    assert model.config.model_type == name.partition("-")[0]
    same_logits(model, tmp_path / "hf")


@pytest.mark.parametrize("biased", [True, False])
def test_q_k_and_v_in_one_tensor(biased: bool, tmp_path: Path) -> None:
    """As files of ChatGLM's own checkpoints have them."""
    config = DENSE["glm" if biased else "glm-plain"]()
    config.head_dim = 16
    save_tiny(config, tmp_path / "hf")
    model = load(write(tmp_path / "tiny.gguf", tmp_path / "hf", "chatglm", fused=True))
    assert model.config.qkv_bias == biased
    same_logits(model, tmp_path / "hf")


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("name", ["glm", "apertus", "starcoder2"])
def test_block_formats_run_as_stored(name: str, tmp_path: Path) -> None:
    config = DENSE[name]()
    config.sliding_window = None
    if name == "glm":
        config.head_dim = 16
    save_tiny(config, tmp_path / "hf")
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write(tmp_path / "tiny.gguf", tmp_path / "hf", ARCHITECTURES[name], fused=name == "glm", kind=kind)
    model = load(path, CpuOps(1), torch.bfloat16, quantization="auto")
    assert "Q8_0" in model.info.revision
    tokens = tokens_for(40)
    found = chunked_logits(model, tokens, [23, 17])
    wanted = chunked_logits(load(tmp_path / "hf"), tokens, [40])
    assert torch.corrcoef(torch.stack((found.flatten(), wanted.flatten())))[0, 1] > 0.995


def test_activations_without_their_numbers_are_named(tmp_path: Path) -> None:
    save_tiny(DENSE["apertus"](), tmp_path / "hf")
    path = write(tmp_path / "tiny.gguf", tmp_path / "hf", "apertus")
    path.write_bytes(path.read_bytes().replace(b"xielu.beta", b"xielu.beto"))
    with pytest.raises(ConfigError, match=r"tiny\.gguf: xielu\.beta has no number for layer 0"):
        load(path)
