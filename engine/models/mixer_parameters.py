"""Loads the recurrent mixer of a layer: Mamba 1 and 2, gated delta rule, short convolution, or lightning attention."""

from __future__ import annotations

import torch

from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.decoder_spec import Mixer
from kvferry.kernels.mixer_spec import GatedDelta, Lightning, Mamba, ShortConv, StateSpace
from kvferry.model_files.recurrent import (
    GatedDeltaSizes,
    LightningSizes,
    MambaSizes,
    MixerSizes,
    ShortConvSizes,
    StateSpaceSizes,
)

SLOPE_EPS = 1e-5
"""Share of lightning attention's slope that its last layer keeps."""


def read_mixer(reader: TensorReader, sizes: MixerSizes, index: int, part: int) -> Mixer:
    """Read the mixer of a layer. part: the first part of its state. Raises as the reader does."""
    prefix = f"model.layers.{index}.mixer"
    if isinstance(sizes, ShortConvSizes):
        return _short_conv(reader, sizes, prefix, part)
    if isinstance(sizes, GatedDeltaSizes):
        return _gated_delta(reader, sizes, prefix, part)
    if isinstance(sizes, StateSpaceSizes):
        return _state_space(reader, sizes, prefix, part)
    if isinstance(sizes, MambaSizes):
        return _mamba(reader, sizes, prefix, part)
    if isinstance(sizes, LightningSizes):
        return _lightning(reader, sizes, index, part)
    raise TypeError(f"no such mixer: {type(sizes).__name__}")


def _short_conv(reader: TensorReader, sizes: ShortConvSizes, prefix: str, part: int) -> ShortConv:
    hidden, channels = reader.config.hidden_size, sizes.channels
    return ShortConv(
        inputs=reader.dense(prefix, [("in_proj", 3 * channels)], hidden, sizes.bias),
        conv=_conv(reader, prefix, channels, sizes.width),
        conv_bias=reader.float32(f"{prefix}.conv1d.bias", channels) if sizes.bias else None,
        out=reader.dense(prefix, [("out_proj", hidden)], channels, sizes.bias),
        part=part,
    )


def _gated_delta(reader: TensorReader, sizes: GatedDeltaSizes, prefix: str, part: int) -> GatedDelta:
    hidden, heads = reader.config.hidden_size, sizes.v_heads
    inputs = [("in_proj_qkv", sizes.channels), ("in_proj_z", sizes.values)]
    rates = [(f"{prefix}.{name}.weight", heads) for name in ("in_proj_b", "in_proj_a")]
    if sizes.grouped:
        inputs = [("in_proj_qkvz", sizes.channels + sizes.values)]
    if sizes.paired:
        rates = [(f"{prefix}.in_proj_ba.weight", 2 * heads)]
    return GatedDelta(
        inputs=reader.dense(prefix, inputs, hidden, bias=False),
        rates=reader.ops.linear(reader.stack(rates, hidden)),  # few rows, whose errors add up over a sequence
        conv=_conv(reader, prefix, sizes.channels, sizes.width),
        decay=_decay(reader, prefix, heads),
        dt_bias=reader.float32(f"{prefix}.dt_bias", heads),
        norm=reader.float32(f"{prefix}.norm.weight", sizes.v_dim),
        out=reader.dense(prefix, [("out_proj", hidden)], sizes.values, bias=False),
        k_heads=sizes.k_heads,
        v_heads=heads,
        k_dim=sizes.k_dim,
        v_dim=sizes.v_dim,
        tiled=sizes.tiled,
        eps=reader.config.norm_eps,
        part=part,
    )


def _state_space(reader: TensorReader, sizes: StateSpaceSizes, prefix: str, part: int) -> StateSpace:
    hidden, heads, factor = reader.config.hidden_size, sizes.heads, reader.config.factors.residual
    inputs = [("in_proj", sizes.inner + sizes.channels + heads)]
    return StateSpace(
        inputs=reader.dense(prefix, inputs, hidden, sizes.bias),
        conv=_conv(reader, prefix, sizes.channels, sizes.width),
        conv_bias=reader.float32(f"{prefix}.conv1d.bias", sizes.channels) if sizes.conv_bias else None,
        decay=_decay(reader, prefix, heads),
        skip=reader.float32(f"{prefix}.D", heads),
        dt_bias=reader.float32(f"{prefix}.dt_bias", heads),
        norm=reader.float32(f"{prefix}.norm.weight", sizes.inner) if sizes.norm else None,
        out=reader.dense(prefix, [("out_proj", hidden)], sizes.inner, sizes.out_bias, factor),
        heads=heads,
        dim=sizes.dim,
        groups=sizes.groups,
        state=sizes.state,
        norm_first=sizes.norm_first,
        limits=sizes.limits,
        eps=reader.config.norm_eps,
        part=part,
    )


def _mamba(reader: TensorReader, sizes: MambaSizes, prefix: str, part: int) -> Mamba:
    hidden, channels = reader.config.hidden_size, sizes.channels
    return Mamba(
        inputs=reader.dense(prefix, [("in_proj", 2 * channels)], hidden, sizes.bias),
        conv=_conv(reader, prefix, channels, sizes.width),
        conv_bias=reader.float32(f"{prefix}.conv1d.bias", channels) if sizes.conv_bias else None,
        selection=reader.dense(prefix, [("x_proj", sizes.rank + 2 * sizes.state)], channels, bias=False),
        dt_norm=reader.rms_norm(f"{prefix}.dt_layernorm", sizes.rank),
        in_norm=reader.rms_norm(f"{prefix}.b_layernorm", sizes.state),
        out_norm=reader.rms_norm(f"{prefix}.c_layernorm", sizes.state),
        steps=reader.dense(prefix, [("dt_proj", channels)], sizes.rank, bias=False),
        dt_bias=reader.float32(f"{prefix}.dt_proj.bias", channels),
        decay=_decay(reader, prefix, channels, sizes.state),
        skip=reader.float32(f"{prefix}.D", channels),
        out=reader.dense(prefix, [("out_proj", hidden)], channels, sizes.bias),
        eps=reader.config.norm_eps,
        part=part,
    )


def _lightning(reader: TensorReader, sizes: LightningSizes, index: int, part: int) -> Lightning:
    prefix, hidden, layers = f"model.layers.{index}.mixer", reader.config.hidden_size, reader.config.num_layers
    powers = torch.arange(1, sizes.heads + 1, dtype=torch.float32) * (-8 / sizes.heads)
    slopes = torch.exp2(powers) * (1 - index / (layers - 1 + SLOPE_EPS) + SLOPE_EPS)
    return Lightning(
        inputs=reader.dense(prefix, [("in_proj", 3 * sizes.inner)], hidden, bias=False),
        gate=reader.dense(prefix, [("gate", sizes.inner)], hidden, bias=False),
        decay=-slopes.to(reader.device),
        norm=reader.rms_norm(f"{prefix}.norm", sizes.inner),
        out=reader.dense(prefix, [("out_proj", hidden)], sizes.inner, bias=False),
        heads=sizes.heads,
        dim=sizes.dim,
        part=part,
    )


def _conv(reader: TensorReader, prefix: str, channels: int, width: int) -> torch.Tensor:
    return reader.float32(f"{prefix}.conv1d.weight", channels, 1, width).view(channels, width)


def _decay(reader: TensorReader, prefix: str, *shape: int) -> torch.Tensor:
    """Return the rate of decay, negative: checkpoints hold the logarithm of its size."""
    return reader.float32(f"{prefix}.A_log", *shape).exp_().neg_()
