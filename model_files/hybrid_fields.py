"""Fields of hybrid models' config.json, converted to the names that other decoders use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.model_files.config_fields import number_or, whole, whole_or
from kvferry.protocol.errors import ConfigError


def uniform_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the common fields that its family spells in its own way; others unchanged.

    Raises ConfigError, or KeyError if a field is missing."""
    reader = _READERS.get(str(config.get("model_type")))
    return config if reader is None else config | reader(config)


def _lfm2(config: dict[str, Any]) -> dict[str, Any]:
    """Return LFM2's fields. The width of its MLP is derived from the one that the config states."""
    inner = whole(config, "block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True):
        inner = 2 * inner // 3
        unit = whole_or(config, "block_multiple_of", 256)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            inner = -(-int(number_or(config, "block_ffn_dim_multiplier", 1.0) * inner) // unit) * unit
    return {
        "intermediate_size": inner,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
    }


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    """Return Granite 4's fields: the MLP of its dense models is what others share beside their experts."""
    shared = whole_or(config, "shared_intermediate_size", 1024)
    own = {"intermediate_size": shared} if not config.get("num_local_experts", 8) else {}
    return own | {"shared_expert_intermediate_size": shared}


def _bamba(config: dict[str, Any]) -> dict[str, Any]:
    """Return Bamba's fields. Half of a head rotates, whatever the config says."""
    given = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
    rope = {name: value for each in given if isinstance(each, dict) for name, value in each.items()}
    return {"rms_norm_eps": config.get("rms_norm_eps", 1e-5), "rope_parameters": rope | {"partial_rotary_factor": 0.5}}


def _falcon_h1(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "attention_multiplier": 0.0,
        "logits_scaling": 1.0 / (number_or(config, "lm_head_multiplier", 1.0) or 1.0),
    }


def _lfm2_moe(config: dict[str, Any]) -> dict[str, Any]:
    """Return LFM2's fields where all layers but the first have experts."""
    if not config.get("use_expert_bias", True):
        raise ConfigError("config.json: use_expert_bias must be true", param="model")
    return {
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        "first_k_dense_replace": int(number_or(config, "num_dense_layers", 2)),
    }


def _jamba(config: dict[str, Any]) -> dict[str, Any]:
    """Return Jamba's fields: every n-th layer has experts, the first ones an MLP of the same width."""
    every, first = whole_or(config, "expert_layer_period", 2), config.get("expert_layer_offset", 1)
    chosen = [index for index in range(whole(config, "num_hidden_layers")) if index % every == first]
    mixed = config.get("moe_layers", chosen) if whole_or(config, "num_experts", 16) > 1 else []
    return {"moe_layers": mixed, "norm_topk_prob": False}


def _nemotron_h(config: dict[str, Any]) -> dict[str, Any]:
    """Return Nemotron-H's fields: a layer is a mixer, attention, an MLP or experts, by a text or a list.

    Embeddings are never tied, whatever the config says."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is not None and not isinstance(kinds, list):
        raise ConfigError(f"config.json: layers_block_type must be a list, got {kinds!r:.40}", param="model")
    if kinds is None:
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        pattern = str(config.get("hybrid_override_pattern") or "")
        if not pattern:
            raise ConfigError("config.json lacks layers_block_type", param="model")
        if odd := set(pattern) - set(letters):
            raise ConfigError(f"config.json: hybrid_override_pattern has {min(odd)!r}, not one of M*-E", param="model")
        kinds = [letters[letter] for letter in pattern]
    mixed = [index for index, kind in enumerate(kinds) if kind == "moe"]
    eps = next((config[name] for name in ("layer_norm_epsilon", "norm_eps", "rms_norm_eps") if name in config), 1e-5)
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "moe_layers": mixed,
        "n_routed_experts": config.get("n_routed_experts", 8) if mixed else 0,
        "shared_expert_intermediate_size": config.get("moe_shared_expert_intermediate_size", 7688) if mixed else 0,
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
        "head_dim": config.get("head_dim", config.get("attention_head_dim", 128)),
        "hidden_act": config.get("mlp_hidden_act", "relu2"),
        "rms_norm_eps": eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _minimax(config: dict[str, Any]) -> dict[str, Any]:
    return {"rms_norm_eps": config.get("rms_norm_eps", 1e-5)}


_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "minimax": _minimax,
    "nemotron_h": _nemotron_h,
}
