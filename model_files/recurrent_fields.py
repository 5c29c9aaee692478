"""Reads the sizes of recurrent layers (model_files.recurrent) from a config.json, by model family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.model_files.config_fields import whole, whole_or
from kvferry.model_files.recurrent import (
    GatedDeltaSizes,
    LightningSizes,
    MambaSizes,
    MixerSizes,
    ShortConvSizes,
    StateSpaceSizes,
)
from kvferry.protocol.errors import ConfigError

MAX_WIDTH = 64
"""Maximum width of a causal convolution, in tokens: sixteen times that of the models known."""


def _short_conv(config: dict[str, Any]) -> ShortConvSizes:
    bias = bool(config.get("conv_bias", False))
    return ShortConvSizes(whole(config, "hidden_size"), _width(config, "conv_L_cache", 3), bias)


def _gated_delta(config: dict[str, Any]) -> GatedDeltaSizes:
    sizes = GatedDeltaSizes(
        k_heads=whole_or(config, "linear_num_key_heads", 16),
        v_heads=whole_or(config, "linear_num_value_heads", 32),
        k_dim=whole_or(config, "linear_key_head_dim", 128),
        v_dim=whole_or(config, "linear_value_head_dim", 128),
        width=_width(config, "linear_conv_kernel_dim", 4),
        grouped=config["model_type"] == "qwen3_next",
        paired=config["model_type"] == "qwen3_next",
    )
    _divides("linear_num_key_heads", sizes.k_heads, "linear_num_value_heads", sizes.v_heads)
    return sizes


def _mamba2(config: dict[str, Any]) -> StateSpaceSizes:
    """Return the sizes of Granite 4 and Bamba."""
    hidden, heads = whole(config, "hidden_size"), whole_or(config, "mamba_n_heads", 128)
    inner = whole_or(config, "mamba_d_ssm", whole_or(config, "mamba_expand", 2) * hidden)
    bias = bool(config.get("mamba_proj_bias", False))
    return StateSpaceSizes(
        heads=heads,
        dim=_head_dim(config, inner, heads),
        groups=_groups(config, "mamba_n_groups", heads, 1),
        state=whole_or(config, "mamba_d_state", 256),
        width=_width(config, "mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        limits=_limits(config),
    )


def _falcon_h1(config: dict[str, Any]) -> StateSpaceSizes:
    return replace(
        _mamba2({"mamba_d_ssm": 1024} | config),
        out_bias=bool(config.get("projectors_bias", False)),
        norm=bool(config.get("mamba_rms_norm", False)),
        norm_first=bool(config.get("mamba_norm_before_gate", True)),
    )


def _nemotron_h(config: dict[str, Any]) -> StateSpaceSizes:
    """Return the sizes of Nemotron-H, some of whose fields have two names."""
    heads, bias = whole_or(config, "mamba_num_heads", 128), bool(config.get("use_bias", False))
    common = {
        name: config[other]
        for name, other in (("n_groups", "mamba_n_groups"), ("conv_kernel", "mamba_d_conv"))
        if other in config
    }
    config = config | common
    return StateSpaceSizes(
        heads=heads,
        dim=whole_or(config, "mamba_head_dim", 64),
        groups=_groups(config, "n_groups", heads, 8),
        state=whole_or(config, "ssm_state_size", 128),
        width=_width(config, "conv_kernel", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=bool(config.get("mamba_conv_bias", config.get("use_conv_bias", True))),
        limits=_limits(config),
    )


def _jamba(config: dict[str, Any]) -> MambaSizes:
    hidden, rank = whole(config, "hidden_size"), config.get("mamba_dt_rank", "auto")
    return MambaSizes(
        channels=whole_or(config, "mamba_expand", 2) * hidden,
        state=whole_or(config, "mamba_d_state", 16),
        rank=-(-hidden // 16) if rank == "auto" else whole(config, "mamba_dt_rank"),
        width=_width(config, "mamba_d_conv", 4),
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
    )


def _lightning(config: dict[str, Any]) -> LightningSizes:
    heads = whole(config, "num_attention_heads")
    return LightningSizes(heads, whole_or(config, "head_dim", whole(config, "hidden_size") // heads))


def _head_dim(config: dict[str, Any], inner: int, heads: int) -> int:
    given = config.get("mamba_d_head") or "auto"
    if given != "auto" and whole(config, "mamba_d_head") * heads != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads {heads} of mamba_d_head {given} do not make up the width of {inner}",
            param="model",
        )
    _divides("mamba_n_heads", heads, "the mixer's width", inner)
    return inner // heads


def _groups(config: dict[str, Any], name: str, heads: int, otherwise: int) -> int:
    groups = whole_or(config, name, otherwise)
    _divides(name, groups, "the number of heads", heads)
    return groups


def _limits(config: dict[str, Any]) -> tuple[float, float]:
    """Return the least and largest time step. JSON has no infinity, so transformers writes it as an object."""
    given = config.get("time_step_limit") or (0.0, math.inf)
    try:
        least, largest = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"config.json: time_step_limit must be two numbers, got {given!r:.80}", param="model"
        ) from error
    return least, largest


def _width(config: dict[str, Any], name: str, otherwise: int) -> int:
    width = whole_or(config, name, otherwise)
    if not 2 <= width <= MAX_WIDTH:
        raise ConfigError(f"config.json: {name} must be 2 to {MAX_WIDTH}, got {width}", param="model")
    return width


def _divides(name: str, part: int, of: str, whole: int) -> None:
    if whole % part:
        raise ConfigError(f"config.json: {name} is {part}, which does not divide {of}, {whole}", param="model")


SIZES: dict[str, Callable[[dict[str, Any]], MixerSizes]] = {
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "granitemoehybrid": _mamba2,
    "bamba": _mamba2,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "minimax": _lightning,
}
"""Readers of the sizes of a family's recurrent layers, by model_type."""
