"""Translation of a GGUF header into the fields of a config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kvferry.engine.models.config import DecoderConfig, parse_config
from kvferry.engine.models.families import FAMILIES
from kvferry.model_files.gguf import GGUFFile
from kvferry.model_files.gguf_latent import latent_fields, latent_rope
from kvferry.model_files.supported_decoders import LATENT, gguf_family
from kvferry.protocol.errors import ConfigError


def parse_gguf(file: GGUFFile) -> DecoderConfig:
    """Return the DecoderConfig of a GGUF header. Raises ConfigError naming what is unsupported or missing."""
    if (family := FAMILIES.get(gguf_family(file))) is not None and not family.gguf:
        raise ConfigError(f"{file.path.name}: GGUF files of {file.architecture} are not supported", param="model")
    config = parse_config(_gguf_as_hf(file))
    names = file.tensors
    return replace(
        config,
        tie_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
    )


def _gguf_as_hf(file: GGUFFile) -> dict[str, Any]:
    """Return the header's values under the names of a config.json."""
    model_type = gguf_family(file)
    heads, kv_heads = file.get("attention.head_count"), file.get("attention.head_count_kv")
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ConfigError(f"{file.path.name}: head counts that differ between layers are not supported", param="model")
    embedding = file.tensors.get("token_embd.weight")
    values = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0] if embedding is not None else None,
        "hidden_size": file.get("embedding_length"),
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": file.get("attention.key_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": file.get("attention.layer_norm_epsilon"),
        "logit_scale": file.get("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "max_position_embeddings": file.get("context_length"),
        "rope_theta": file.get("rope.freq_base"),
        "rope_scaling": _gguf_rope(file),
        "sliding_window": file.get("attention.sliding_window"),
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": file.get("expert_weights_norm", True if model_type == "qwen3_moe" else None),
    }
    if model_type in LATENT:
        values |= {"head_dim": None, "norm_topk_prob": None} | latent_fields(file)
    return {name: value for name, value in values.items() if value is not None}


def _gguf_rope(file: GGUFFile) -> dict[str, Any]:
    """Return the rope settings; a rotary dimension that differs from the head's becomes a partial factor.

    attn_factor multiplies yarn's own attention factor, while Hugging Face's attention_factor replaces it."""
    heads, hidden = file.get("attention.head_count", 1), file.get("embedding_length", 1)
    head_dim = file.get("attention.key_length") or hidden // heads
    rope: dict[str, Any] = {"partial_rotary_factor": file.get("rope.dimension_count", head_dim) / head_dim}
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
    weight = file.get("rope.scaling.attn_factor")
    if kind == "yarn" and weight is not None:
        rope["attention_factor"] = weight * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return rope
