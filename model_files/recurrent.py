"""Sizes of recurrent layers (Mamba, gated delta nets and others): shapes of a sequence's state, and weight counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the parts of a layer's state, each of float32 numbers."""


class MixerSizes(Protocol):
    """Sizes of one kind of recurrent layer."""

    @property
    def states(self) -> Shapes:
        """Return the shapes of a layer's state."""

    def weights(self, hidden: int) -> int:
        """Return the number of weights of a layer's matrices: dense layers, convolution and rates by channel."""


@dataclass(frozen=True, slots=True)
class ShortConvSizes:
    """Gated short convolution of LFM2: `channels` of a convolution over `width` tokens. bias: of all its layers."""

    channels: int
    width: int
    bias: bool

    @property
    def states(self) -> Shapes:
        return ((self.channels, self.width - 1),)

    def weights(self, hidden: int) -> int:
        return self.channels * (4 * hidden + self.width)


@dataclass(frozen=True, slots=True)
class GatedDeltaSizes:
    """Gated delta net (Yang et al. 2024): heads of queries and keys, heads of values, and a convolution over all.

    grouped: checkpoints hold rows of queries, keys, values and gates in one tensor by key head; paired: they do so with
    beta and decays (both Qwen3-Next). tiled: value head i belongs to key head i % k_heads, not to its neighbour."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    grouped: bool = False
    paired: bool = False
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def states(self) -> Shapes:
        return (self.channels, self.width - 1), (self.v_heads, self.k_dim, self.v_dim)

    def weights(self, hidden: int) -> int:
        dense = self.channels + 2 * self.values + 2 * self.v_heads
        return dense * hidden + self.channels * self.width


@dataclass(frozen=True, slots=True)
class StateSpaceSizes:
    """Selective state space of Mamba 2 (Dao and Gu 2024): heads of `dim`, `groups` of input and output vectors.

    state: numbers kept for each channel. bias, out_bias: of the projections; conv_bias: of the convolution. norm: there
    is a gated norm, in as many groups as `groups`; norm_first: it comes before its gate. limits: least and largest time
    step."""

    heads: int
    dim: int
    groups: int
    state: int
    width: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    norm_first: bool = False
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs of the heads, then input and output vectors of the groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def states(self) -> Shapes:
        return (self.channels, self.width - 1), (self.heads, self.dim, self.state)

    def weights(self, hidden: int) -> int:
        return (2 * self.inner + self.channels + self.heads) * hidden + self.channels * self.width


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Selective state space of Mamba (Gu and Dao 2023) with Jamba's norms: `channels` with a state each.

    rank: width from which time steps are computed. bias: of the projections; conv_bias: of the convolution."""

    channels: int
    state: int
    rank: int
    width: int
    bias: bool = False
    conv_bias: bool = True

    @property
    def states(self) -> Shapes:
        return (self.channels, self.width - 1), (self.channels, 1, self.state)

    def weights(self, hidden: int) -> int:
        return self.channels * (3 * hidden + 2 * self.rank + 3 * self.state + self.width)


@dataclass(frozen=True, slots=True)
class LightningSizes:
    """Lightning attention (Qin et al. 2024): `heads` of `dim`, each with a decay of its own."""

    heads: int
    dim: int

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.dim

    @property
    def states(self) -> Shapes:
        return ((self.heads, self.dim, self.dim),)

    def weights(self, hidden: int) -> int:
        return 5 * self.inner * hidden
