"""GGUF header of a hybrid model, translated into fields of a config.json.

Tensor names show which layers have attention, a recurrent mixer, an MLP or experts; headers state it differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.model_files.gguf import GGUFFile
from kvferry.model_files.gguf_experts import layers_of
from kvferry.protocol.errors import ConfigError

HYBRID_ARCHITECTURES = {
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "granitehybrid": "granitemoehybrid",
    "falcon-h1": "falcon_h1",
    "jamba": "jamba",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}
"""Values of model_type by GGUF architecture."""
_MIXERS = ("ssm_conv1d.weight", "shortconv.conv.weight")


def one_number(file: GGUFFile, key: str) -> Any:
    """Return a header's value that may be a list with an entry for each layer, 0 for layers without such a part.

    Raises ConfigError if other entries differ."""
    value = file.get(key)
    if not isinstance(value, list):
        return value
    found = {each for each in value if each}
    if len(found) > 1:
        raise ConfigError(f"{file.path.name}: {key} differs between layers, which is not supported", param="model")
    return found.pop() if found else None


def hybrid_header(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a hybrid model's config.json; none for other architectures. Raises ConfigError."""
    reader = _READERS.get(file.architecture)
    if reader is None:
        return {}
    count = layers_of(file)
    layers = range(count if isinstance(count, int) else 0)
    found = {
        "num_key_value_heads": one_number(file, "attention.head_count_kv"),
        "intermediate_size": one_number(file, "feed_forward_length"),
        "layer_types": [_kind(file, index) for index in layers],
        "use_qk_norm": _any(file, "attn_q_norm.weight"),
        **reader(file),
    }
    if file.get("expert_count"):
        found["moe_layers"] = [index for index in layers if _holds(file, index, "ffn_gate_inp.weight")]
    return {name: value for name, value in found.items() if value is not None}


def _kind(file: GGUFFile, index: int) -> str:
    attends, recurs = _holds(file, index, "attn_q.weight"), any(_holds(file, index, name) for name in _MIXERS)
    if attends and recurs:
        return "hybrid"
    if attends or recurs:
        return "attention" if attends else "recurrent"
    return "moe" if _holds(file, index, "ffn_gate_inp.weight") else "mlp"


def _holds(file: GGUFFile, index: int, name: str) -> bool:
    return f"blk.{index}.{name}" in file.tensors


def _any(file: GGUFFile, name: str) -> bool:
    return any(each.endswith(f".{name}") for each in file.tensors)


def _rows(file: GGUFFile, name: str, dimension: int = 0) -> int | None:
    """Return a dimension of the first layer's tensor that is called so; None without one."""
    shapes = (tensor.shape for each, tensor in file.tensors.items() if each.endswith(f".{name}"))
    return next((shape[dimension] for shape in shapes), None)


def _part(file: GGUFFile, of: str, by: str) -> int | None:
    """Return the quotient of two numbers of the header; None if one is missing."""
    whole, count = file.get(of), file.get(by)
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count else None


def _lfm2(file: GGUFFile) -> dict[str, Any]:
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.get("shortconv.l_cache"),
        "norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "num_dense_layers": file.get("leading_dense_block_count"),
    }


def _gated_delta(file: GGUFFile) -> dict[str, Any]:
    return {
        "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
        "linear_key_head_dim": file.get("ssm.state_size"),
        "linear_num_key_heads": file.get("ssm.group_count"),
        "linear_num_value_heads": file.get("ssm.time_step_rank"),
        "linear_value_head_dim": _part(file, "ssm.inner_size", "ssm.time_step_rank"),
    }


def _mamba2(file: GGUFFile) -> dict[str, Any]:
    return {
        "mamba_n_heads": file.get("ssm.time_step_rank"),
        "mamba_d_head": _part(file, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_d_ssm": file.get("ssm.inner_size"),
        "mamba_n_groups": file.get("ssm.group_count"),
        "mamba_d_state": file.get("ssm.state_size"),
        "mamba_d_conv": file.get("ssm.conv_kernel"),
        "mamba_conv_bias": _any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any(file, "ssm_in.bias"),
    }


def _granite(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of Granite 4 and of Bamba, which rotates and has no factors."""
    turns, scale = bool(file.get("rope.scaling.finetuned")), file.get("attention.scale")
    width = _rows(file, "ffn_gate_shexp.weight") or _rows(file, "ffn_gate.weight")
    return _mamba2(file) | {
        "position_embedding_type": "rope" if turns else "nope",
        "attention_multiplier": 0.0 if scale is None else scale,
        "num_local_experts": file.get("expert_count", 0),
        "shared_intermediate_size": width,
        "intermediate_size": _rows(file, "ffn_gate_exps.weight", 1) or width,
    }


def _falcon_h1(file: GGUFFile) -> dict[str, Any]:
    """Return Falcon-H1's fields. Its multipliers are in the weights."""
    return _mamba2(file) | {
        "mamba_rms_norm": _any(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _any(file, "ssm_out.bias"),
    }


def _jamba(file: GGUFFile) -> dict[str, Any]:
    return {
        "mamba_expand": _part(file, "ssm.inner_size", "embedding_length"),
        "mamba_d_state": file.get("ssm.state_size"),
        "mamba_dt_rank": file.get("ssm.time_step_rank"),
        "mamba_d_conv": file.get("ssm.conv_kernel"),
        "mamba_conv_bias": _any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any(file, "ssm_in.bias"),
    }


def _nemotron_h(file: GGUFFile) -> dict[str, Any]:
    return {
        "mamba_num_heads": file.get("ssm.time_step_rank"),
        "mamba_head_dim": _part(file, "ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": file.get("ssm.group_count"),
        "ssm_state_size": file.get("ssm.state_size"),
        "conv_kernel": file.get("ssm.conv_kernel"),
        "use_conv_bias": _any(file, "ssm_conv1d.bias"),
        "use_bias": _any(file, "ssm_in.bias"),
        "layer_norm_epsilon": file.get("attention.layer_norm_rms_epsilon"),
        "n_routed_experts": file.get("expert_count"),
        "moe_shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
        "moe_latent_size": file.get("moe_latent_size"),
    }


_READERS: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen3next": _gated_delta,
    "qwen35": _gated_delta,
    "qwen35moe": _gated_delta,
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
