"""Dataclasses of recurrent mixers (short convolution, gated delta, Mamba 1 and 2, lightning): weights and sizes.

`part` is the first part of the layer's state in the model's `StateLayout`: the window of the convolution, then the
state of heads or channels. Convolutions have float32 weights [channels, width] and biases [channels] or None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvferry.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution (LFM2): inputs gives gates B and C and x, [3 * channels]; the output is C * conv(B * x).

    Its state is the window of the convolution."""

    inputs: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    out: Linear
    part: int

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.inputs, self.out)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta net (Yang et al. 2024), with a convolution over queries, keys and values.

    inputs: queries, keys, values and the output's gate, in this order. rates: beta and the decay's input of each value
    head, [2 * v_heads]. decay: float32 [v_heads], negative, the rate of decay. dt_bias: float32 [v_heads]. norm:
    float32 [v_dim], of each head's output before its gate. tiled: value head i belongs to key head i % k_heads."""

    inputs: Linear
    rates: Linear
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: Linear
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    tiled: bool
    eps: float
    part: int

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.inputs, self.rates, self.out)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Selective state space of Mamba 2 (Dao and Gu 2024).

    inputs: the output's gate, then the convolution's channels (inputs of the heads, input vectors and output vectors of
    the groups), then a time step of each head. decay: float32 [heads], negative. skip, dt_bias: float32 [heads]. norm:
    float32 [heads * dim], applied to the gated output per group, or None; norm_first: applied before the gate instead.
    limits: smallest and largest time step. state: numbers of each channel."""

    inputs: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    decay: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor | None
    out: Linear
    heads: int
    dim: int
    groups: int
    state: int
    norm_first: bool
    limits: tuple[float, float]
    eps: float
    part: int

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.inputs, self.out)


@dataclass(frozen=True, slots=True)
class Mamba:
    """Selective state space of Mamba (Gu and Dao 2023) with Jamba's norms.

    inputs: the convolution's channels, then the output's gate. selection: maps the convolution's output to the time
    steps' ranks, the input vector and the output vector, each with a norm. steps: maps the ranks to one time step per
    channel. decay: float32 [channels, state], negative. skip, dt_bias: float32 [channels]."""

    inputs: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    selection: Linear
    dt_norm: torch.Tensor
    in_norm: torch.Tensor
    out_norm: torch.Tensor
    steps: Linear
    dt_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    out: Linear
    eps: float
    part: int

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.inputs, self.selection, self.steps, self.out)


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention (Qin et al. 2024), which has no convolution.

    inputs: query, key and value of each head in turn, before SiLU. gate: its sigmoid multiplies the normed output.
    decay: float32 [heads], negative. norm: [heads * dim]."""

    inputs: Linear
    gate: Linear
    decay: torch.Tensor
    norm: torch.Tensor
    out: Linear
    heads: int
    dim: int
    part: int
    eps: float = 1e-6

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.inputs, self.gate, self.out)
