"""Translates a GGUF header into the fields of a config.json, and parses them as a DecoderConfig."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kvferry.engine.models.config import DecoderConfig, parse_config
from kvferry.engine.models.dense_families import LLAMA
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.gguf_hybrid import as_stored
from kvferry.engine.models.rope_config import SLIDING
from kvferry.model_files.config_fields import whole
from kvferry.model_files.gguf import GGUFFile
from kvferry.model_files.gguf_experts import chunk_fields, expert_fields, layers_of
from kvferry.model_files.gguf_gemma import shape_fields, window_fields
from kvferry.model_files.gguf_hybrid import hybrid_header
from kvferry.model_files.gguf_latent import latent_fields, latent_rope
from kvferry.model_files.layer_shapes import SHAPED
from kvferry.model_files.supported_decoders import LATENT, gguf_family
from kvferry.protocol.errors import ConfigError


def parse_gguf(file: GGUFFile) -> DecoderConfig:
    """Return the DecoderConfig of a GGUF header. Raises ConfigError naming an unsupported or missing field."""
    if (family := FAMILIES.get(gguf_family(file))) is not None and not family.gguf:
        raise ConfigError(f"{file.path.name}: GGUF files of {file.architecture} are not supported", param="model")
    config = as_stored(file, parse_config(_gguf_as_hf(file)))
    biases = {name.partition(".")[2].partition(".")[2] for name in file.tensors if name.endswith(".bias")}
    return replace(
        config,
        # Converters add a family's offset to the weights of norms.
        family=replace(config.family, norm_offset=0.0),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="attn_q.bias" in biases or "attn_qkv.bias" in biases,
        o_bias="attn_output.bias" in biases,
        mlp_bias="ffn_down.bias" in biases,
        head_bias="output.bias" in file.tensors,
    )


def _gguf_as_hf(file: GGUFFile) -> dict[str, Any]:
    """Return the header's values under the names of a config.json."""
    model_type = gguf_family(file)
    family = FAMILIES.get(model_type, LLAMA)
    heads, kv_heads = file.get("attention.head_count"), file.get("attention.head_count_kv")
    hybrid, shaped = hybrid_header(file), model_type in SHAPED
    kv_heads = hybrid.get("num_key_value_heads", kv_heads)
    if isinstance(heads, list) or (isinstance(kv_heads, list) and not shaped):
        raise ConfigError(f"{file.path.name}: head counts that differ between layers are not supported", param="model")
    embedding = file.tensors.get("token_embd.weight")
    values = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0] if embedding is not None else None,
        "hidden_size": file.get("embedding_length"),
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": layers_of(file),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": file.get("attention.key_length"),
        family.eps[0]: file.get("attention.layer_norm_rms_epsilon", file.get("attention.layer_norm_epsilon")),
        "logit_scale": file.get("logit_scale"),
        family.qk_norm_option: "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "clip_qkv": file.get("attention.clamp_kqv"),
        "max_position_embeddings": file.get("context_length"),
        "rope_theta": file.get("rope.freq_base"),
        "rope_scaling": _gguf_rope(file),
        "sliding_window": file.get("attention.sliding_window"),
        "layer_types": _layer_types(file),
        "embedding_multiplier": file.get("embedding_scale"),
        "attention_multiplier": file.get("attention.scale"),
        "residual_multiplier": file.get("residual_scale"),
        "logits_scaling": file.get("logit_scale"),
    }
    values = window_fields(file) | {name: value for name, value in values.items() if value is not None}
    values |= expert_fields(file) | (chunk_fields(file) if model_type == "llama4_text" else {}) | hybrid
    if model_type in LATENT:
        values |= {"head_dim": None, "norm_topk_prob": None} | latent_fields(file)
    if shaped:
        values |= shape_fields(file, whole({"block_count": layers_of(file)}, "block_count"))
    return {name: value for name, value in values.items() if value is not None}


def _layer_types(file: GGUFFile) -> list[str] | None:
    """Return the kinds of layers where the header says which have a window."""
    marks = file.get("attention.sliding_window_pattern")
    return [SLIDING if mark else "full_attention" for mark in marks] if isinstance(marks, list) else None


def _gguf_rope(file: GGUFFile) -> dict[str, Any]:
    """Return the rope settings; a rotary dimension that differs from the head's becomes a partial factor.

    attn_factor multiplies yarn's own attention factor, while Hugging Face's attention_factor replaces it."""
    heads, hidden = file.get("attention.head_count", 1), file.get("embedding_length", 1)
    head_dim = file.get("attention.key_length") or hidden // heads
    rope: dict[str, Any] = {
        "partial_rotary_factor": file.get("rope.dimension_count", head_dim) / head_dim,
        "llama_4_scaling_beta": file.get("attention.temperature_scale"),
    }
    if gguf_family(file) in LATENT:
        rope = latent_rope(file)
    kind = file.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    factor = file.get("rope.scaling.factor", 1.0)
    original = file.get("rope.scaling.original_context_length")
    if gguf_family(file) == "gpt_oss":
        rope["truncate"] = False  # from its config.json; GGUF files lack it
    rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    rope |= {name: file.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if gguf_family(file) not in LATENT and (weight := file.get("rope.scaling.yarn_log_multiplier")):
        rope["mscale"] = rope["mscale_all_dim"] = weight  # their factors of attention cancel out
    weight = file.get("rope.scaling.attn_factor")
    if kind == "yarn" and weight is not None:
        rope["attention_factor"] = weight * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return rope
