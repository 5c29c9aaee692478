"""GGUF header of a mixture of experts, translated into fields of a config.json."""

from __future__ import annotations

import re
from typing import Any

from kvferry.model_files.gguf import GGUFFile

_LAYER = re.compile(r"blk\.(\d+)\.")
_SHARED = ".ffn_gate_shexp.weight"
CHUNK = 8192
"""Positions in which Llama 4's layers attend."""


def layers_of(file: GGUFFile) -> Any:
    """Return the number of layers without those after them that predict further tokens."""
    count, further = file.get("block_count"), file.get("nextn_predict_layers", 0)
    return count - further if isinstance(count, int) and isinstance(further, int) else count


def runs(name: str, file: GGUFFile) -> bool:
    """Return whether the tensor is of the embedding, of a layer that is run, or of the head."""
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < layers_of(file)


def expert_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the header's fields about experts, under the names of `model_files.expert_fields`.

    Tensors give the width of the MLP for all tokens, since headers of some converters hold another number."""
    if not file.get("expert_count"):
        return {}
    shared = next((tensor.shape[0] for name, tensor in file.tensors.items() if name.endswith(_SHARED)), 0)
    fields = {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
        "first_k_dense_replace": file.get("leading_dense_block_count"),
        "decoder_sparse_step": file.get("interleave_moe_layer_step"),
        "routed_scaling_factor": file.get("expert_weights_scale"),
        "norm_topk_prob": file.get("expert_weights_norm", True if file.architecture == "qwen3moe" else None),
        "n_group": file.get("expert_group_count") or 1,
        "topk_group": file.get("expert_group_used_count") or 1,
    }
    return {name: value for name, value in fields.items() if value is not None}


def chunk_fields(file: GGUFFile) -> dict[str, Any]:
    """Return Llama 4's settings of attention, which its files do not hold: every model has the same.

    A window of 0 stands for full attention. Only Maverick, with 128 experts, has no norms of queries and keys."""
    full = file.get("attention.sliding_window") == 0
    layers = layers_of(file)
    return {
        "attention_chunk_size": 0 if full else CHUNK,
        "no_rope_layer_interval": layers + 1 if full and isinstance(layers, int) else 4,
        "use_qk_norm": file.get("expert_count") != 128,
    }
