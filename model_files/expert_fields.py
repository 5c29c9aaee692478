"""Fields of a config.json about mixtures of experts, converted to the names that most families use."""

from __future__ import annotations

from typing import Any

from kvferry.model_files.config_fields import whole, whole_or
from kvferry.model_files.hybrid_fields import uniform_fields
from kvferry.protocol.errors import ConfigError

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts; transformers writes the first for the second."""
_NAMES = {
    "ernie4_5_moe": {
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
        "decoder_sparse_step": "moe_layer_interval",
    },
    "exaone_moe": {"n_shared_experts": "num_shared_experts"},
    "granitemoeshared": {"shared_expert_intermediate_size": "shared_intermediate_size"},
    "hunyuan_v1_moe": {
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_topk",
        "moe_intermediate_size": "moe_intermediate_size",
        "shared_expert_intermediate_size": "intermediate_size",
    },
    "llama4_text": {
        "moe_intermediate_size": "intermediate_size",
        "shared_expert_intermediate_size": "intermediate_size",
        "intermediate_size": "intermediate_size_mlp",
        "decoder_sparse_step": "interleave_moe_layer_step",
    },
}
"""Families' own names, by the common ones."""


def common_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a text model with the common names beside its own.

    A list with a value for each layer becomes that value. Raises ConfigError where layers differ, or KeyError if a
    field is missing."""
    config, kind = uniform_fields(config), str(config.get("model_type"))
    names = {} if kind == "llama4_text" and "intermediate_size_mlp" not in config else _NAMES.get(kind, {})
    own = {common: _of_all_layers(config, name) for common, name in names.items() if name in config}
    if kind == "minimax_m2" and config.get("rotary_dim"):
        own["partial_rotary_factor"] = whole(config, "rotary_dim") / whole(config, "head_dim")
    return config | own


def _of_all_layers(config: dict[str, Any], name: str) -> Any:
    value = config[name]
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise ConfigError(f"config.json: {name} differs between layers, which is not supported", param="model")
    return value[0]


def experts_in(config: dict[str, Any]) -> int:
    """Return the number of experts in a layer that has them; 0: the model has none. config: of `common_names`."""
    return next((int(config[name]) for name in COUNTS if isinstance(config.get(name), int)), 0)


def holds_experts(config: dict[str, Any], index: int) -> bool:
    """Return whether a layer of a mixture has experts in place of its MLP. config: of `common_names`."""
    kinds, chosen = config.get("mlp_layer_types"), config.get("moe_layers")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] == "sparse")
    if isinstance(chosen, list):
        return index in chosen
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    first, each = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    last = config.get("moe_layer_end_index", -1)
    before_last = not isinstance(last, int) or last < 0 or index <= last
    return index not in dense and (index + 1) % every == 0 and index >= first and index % each == 0 and before_last


def shared_width(config: dict[str, Any], size: int) -> int:
    """Return the width of the MLP that all tokens pass through beside experts of width `size`; 0: there is none.

    config: of `common_names`."""
    if "shared_expert_intermediate_size" in config:
        return whole_or(config, "shared_expert_intermediate_size", 0)
    return size * whole_or(config, "n_shared_experts", 0)
