"""Weights of Whisper's layers (encoder and decoder compute attention), and ModuleReader, which reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.engine.models.weights import Weights
from kvferry.kernels.activation import GELU
from kvferry.kernels.layer_norm import LayerNorm
from kvferry.kernels.linear import Linear
from kvferry.kernels.ops import Ops

EPS = 1e-5
"""Added to the variance of layer norms."""
MAX_COLUMNS = 8
"""Largest number of rows that are multiplied as columns."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Norm, two dense layers and the residual."""

    norm: LayerNorm
    up: Linear
    down: Linear

    def add_to(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Return x [T, width] plus the MLP's output."""
        return x + self.down(ops.activate(self.up(ops.layer_norm(x, self.norm, EPS)), GELU))


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Norm, projection to queries, keys and values [T, 3 * width], and output projection."""

    norm: LayerNorm
    qkv: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention to the encoder's output. kv: its projection to keys and values [positions, 2 * width]."""

    norm: LayerNorm
    q: Linear
    kv: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer of the encoder."""

    attention: SelfAttention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of the decoder."""

    attention: SelfAttention
    cross: CrossAttention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Embedding, which is the vocabulary projection as well. columns: its weight, if it multiplies few rows as columns.

    PyTorch multiplies one row of float32 in 10.4 ms by the weight of base, two columns in 3.2 ms (Zen 4, two cores)."""

    linear: Linear
    columns: torch.Tensor | None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self.linear.rows(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocabulary] of hidden states [n, width]."""
        count = len(hidden)
        if self.columns is None or count > MAX_COLUMNS:
            return self.linear(hidden, torch.float32)
        pair = hidden.contiguous() if count > 1 else hidden.repeat(2, 1)
        return torch.mm(self.columns, pair.T)[:, :count].T.contiguous()


class ModuleReader:
    """Reads modules in one number format. Raises ConfigError naming a tensor that is missing or of another shape.

    read: called after each tensor."""

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, ops: Ops, width: int, read: Callable[[], None]
    ) -> None:
        self._weights, self._device, self._dtype, self._ops, self._width = weights, device, dtype, ops, width
        self._read = read

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of this shape."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weights.read(name, out)
        self._read()
        return out

    def norm(self, name: str) -> LayerNorm:
        """Return a layer norm."""
        return LayerNorm(self.tensor(f"{name}.weight", self._width), self.tensor(f"{name}.bias", self._width))

    def self_attention(self, name: str) -> SelfAttention:
        """Return a layer's self attention; keys have no bias."""
        inner = f"{name}.self_attn"
        qkv = self._joined(inner, "q_proj", "k_proj", "v_proj")
        return SelfAttention(self.norm(f"{inner}_layer_norm"), qkv, self._linear(f"{inner}.out_proj"))

    def cross_attention(self, name: str) -> CrossAttention:
        """Return a layer's attention to the encoder's output."""
        inner = f"{name}.encoder_attn"
        norm, kv = self.norm(f"{inner}_layer_norm"), self._joined(inner, "k_proj", "v_proj")
        return CrossAttention(norm, self._linear(f"{inner}.q_proj"), kv, self._linear(f"{inner}.out_proj"))

    def mlp(self, name: str, inner: int) -> Mlp:
        """Return a layer's MLP with `inner` inner numbers."""
        up = self._linear(f"{name}.fc1", inner, self._width)
        return Mlp(self.norm(f"{name}.final_layer_norm"), up, self._linear(f"{name}.fc2", self._width, inner))

    def vocabulary(self, name: str, rows: int) -> Vocabulary:
        """Return the embedding."""
        weight = self.tensor(f"{name}.weight", rows, self._width)
        plain = weight.dtype is torch.float32 and weight.device.type == "cpu"
        return Vocabulary(self._ops.linear(weight), weight if plain else None)

    def _linear(self, name: str, rows: int = 0, columns: int = 0) -> Linear:
        shape = rows or self._width, columns or self._width
        return self._ops.linear(self.tensor(f"{name}.weight", *shape), self.tensor(f"{name}.bias", shape[0]))

    def _joined(self, inner: str, *names: str) -> Linear:
        """Return projections of the same input as one; `k_proj` has no bias."""
        width = self._width
        weight = torch.cat([self.tensor(f"{inner}.{name}.weight", width, width) for name in names])
        bias = torch.cat([
            weight.new_zeros(width) if name == "k_proj" else self.tensor(f"{inner}.{name}.bias", width)
            for name in names
        ])  # fmt: skip
        return self._ops.linear(weight, bias)
