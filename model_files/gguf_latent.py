"""GGUF header of DeepSeek V2 and V3 (architecture deepseek2), translated into fields of a config.json."""

from __future__ import annotations

from typing import Any

from kvferry.model_files.gguf import GGUFFile

_LOG = 0.1
"""Factor by which llama.cpp multiplies YaRN's mscale_all_dim."""


def latent_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the header's fields as those of a config.json.

    Newer files state the sizes of heads apart from those of the cached latents. If a file names no groups, experts are
    chosen among all."""
    wide, rotated = file.get("attention.key_length_mla"), file.get("rope.dimension_count", 0)
    head = wide or file.get("attention.key_length", 0)
    groups = file.get("expert_group_count", 1)
    fields = {
        "num_key_value_heads": file.get("attention.head_count"),
        "kv_lora_rank": file.get("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": file.get("attention.value_length_mla" if wide else "attention.value_length"),
        "n_shared_experts": file.get("expert_shared_count"),
        "first_k_dense_replace": file.get("leading_dense_block_count"),
        "routed_scaling_factor": file.get("expert_weights_scale"),
        "norm_topk_prob": file.get("expert_weights_norm"),
        "n_group": groups,
        "topk_group": file.get("expert_group_used_count", 1),
    }
    if groups > 1 and file.get("expert_gating_func", 1) == 1:
        fields["topk_method"] = "group_limited_greedy"
    return {name: value for name, value in fields.items() if value is not None}


def latent_rope(file: GGUFFile) -> dict[str, Any]:
    """Return YaRN's attention factor, which applies to scores as a whole."""
    message = file.get("rope.scaling.yarn_log_multiplier")
    return {} if message is None else {"mscale": message / _LOG, "mscale_all_dim": message / _LOG}
