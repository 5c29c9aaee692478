"""GGUF header of Gemma 2, 3, 3n and 4, translated into fields of a config.json."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from kvferry.model_files.gguf import GGUFFile
from kvferry.protocol.errors import ConfigError

_SLIDING, _FULL = "sliding_attention", "full_attention"
_LOCAL_THETA = 10000.0
"""Base of the rotation in layers with a window, unless the header says."""
_WINDOW = 4096
"""Window of Gemma 2, unless the header says."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B, by architecture: their scores are scaled by the hidden size by heads."""


def window_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of Gemma 2 and 3 that other families lack; their files leave out the scale of scores."""
    if file.architecture not in _LARGEST:
        return {}
    heads, hidden = file.get("attention.head_count"), file.get("embedding_length")
    scaled = file.get("block_count") == _LARGEST[file.architecture] and isinstance(hidden, int)
    period = file.get("attention.sliding_window_pattern")
    fields = {
        "query_pre_attn_scalar": hidden // heads if scaled and heads else file.get("attention.key_length"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "sliding_window_pattern": period if isinstance(period, int) else None,
        "rope_local_base_freq": file.get("rope.freq_base_swa", _LOCAL_THETA),
    }
    return {"sliding_window": _WINDOW} | fields if file.architecture == "gemma2" else fields


def shape_fields(file: GGUFFile, layers: int) -> dict[str, Any]:
    """Return the header's fields about layers, under the names of a config.json. Raises ConfigError."""
    gemma4, table = file.architecture == "gemma4", file.tensors.get("per_layer_token_embd.weight")
    sliding = _sliding(file, layers, period=6 if gemma4 else 5)
    fields = {
        "layer_types": [_SLIDING if slides else _FULL for slides in sliding],
        "num_kv_shared_layers": _count(file, "attention.shared_kv_layers", 0 if gemma4 else 15),
        "hidden_size_per_layer_input": _count(file, "embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table is not None else 1,
        "intermediate_size": file.get("feed_forward_length"),
        "num_key_value_heads": _each(file, "attention.head_count_kv", layers)[0],
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {"rope_theta": file.get("rope.freq_base")},
            _SLIDING: {"rope_theta": file.get("rope.freq_base_swa", _LOCAL_THETA)},
        },
    }
    return fields | (_gemma4(file, sliding) if gemma4 else _gemma3n(file))


def _gemma4(file: GGUFFile, sliding: list[bool]) -> dict[str, Any]:
    """Return the fields that only Gemma 4 has. A layer without V uses its K as V."""
    dims = file.get("attention.key_length"), file.get("attention.key_length_swa", file.get("attention.key_length"))
    heads = _each(file, "attention.head_count_kv", len(sliding))
    first = len(sliding) - _count(file, "attention.shared_kv_layers", 0)
    alike = [i for i in range(first) if f"blk.{i}.attn_v.weight" not in file.tensors]
    return {
        "head_dim": dims[1],
        "per_layer_config": {
            str(index): {"head_dim": dims[slides], "num_key_value_heads": heads[index]}
            for index, slides in enumerate(sliding)
        },
        "attention_k_eq_v": bool(alike),
        "enable_moe_block": bool(file.get("expert_count")),
        "top_k_experts": file.get("expert_used_count"),
    }


def _gemma3n(file: GGUFFile) -> dict[str, Any]:
    """Return the fields that only Gemma 3n has.

    The header holds quantiles of the MLPs' sparsity, minus infinity for none."""
    laurel, scales = file.tensors.get("blk.0.laurel_l.weight"), file.get("activation_sparsity_scale")
    return {
        "altup_num_inputs": file.get("altup.num_inputs"),
        "altup_active_idx": file.get("altup.active_idx"),
        "laurel_rank": laurel.shape[0] if laurel is not None else None,
        "activation_sparsity_pattern": scales if not isinstance(scales, list) else [_share(each) for each in scales],
    }


def _share(quantile: Any) -> Any:
    """Return the share that a quantile of the normal distribution cuts off; anything else is returned unchanged."""
    if not isinstance(quantile, int | float):
        return quantile
    return NormalDist().cdf(quantile) if math.isfinite(quantile) else 0.0


def _count(file: GGUFFile, key: str, otherwise: int) -> int:
    """Return a count; some converters wrote a float. Raises ConfigError."""
    value = file.get(key, otherwise)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{file.path.name}: {key} must be a number of at least 0, got {value!r:.80}", param="model")
    return int(value)


def _sliding(file: GGUFFile, layers: int, period: int) -> list[bool]:
    """Return which layers have a window: from a list, or all but every n-th."""
    given = file.get("attention.sliding_window_pattern", period)
    if isinstance(given, int) and given > 0:
        return [(index + 1) % given != 0 for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise ConfigError(f"{file.path.name}: sliding_window_pattern must have {layers} entries", param="model")
    return [bool(each) for each in given]


def _each(file: GGUFFile, key: str, layers: int) -> list[Any]:
    """Return a value for each layer, which the header may give once for all. Raises ConfigError."""
    given = file.get(key)
    if not isinstance(given, list):
        return [given] * layers
    if len(given) != layers:
        raise ConfigError(f"{file.path.name}: {key} must have {layers} entries, got {len(given)}", param="model")
    return given
