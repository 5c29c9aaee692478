"""PyTorch operations that backends share: dense layers, grouped experts, LoRA, logit adjustments and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from kvferry.kernels.activation import Activation, activate
from kvferry.kernels.capabilities import Capabilities
from kvferry.kernels.decoder_spec import DecoderForm, Gated, GroupedGated, Stored
from kvferry.kernels.decoder_step import OneByOne, Step
from kvferry.kernels.layer_norm import LayerNorm, layer_norm
from kvferry.kernels.linear import Linear, LinearOfHeads, StoredLinear
from kvferry.kernels.logit_adjustments import Adjusted
from kvferry.kernels.lora import LowRank, add_low_rank
from kvferry.kernels.recurrent_layers import TorchRecurrent
from kvferry.kernels.sampling import NoiseKeys, draw
from kvferry.kernels.token_masks import Masks
from kvferry.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A `Linear` in PyTorch, in the weight's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        own = x.to(self.weight.dtype)
        if dtype is torch.float32 and own.is_cuda and own.dtype is not dtype:
            return self._in_float32(own)
        return F.linear(own, self.weight, self.bias).to(dtype or x.dtype)

    def _in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Return products of 16-bit numbers with their float32 sums: rounded to bfloat16 the sums would tie."""
        out = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
        out = out if self.bias is None else out.add_(self.bias)
        return out.view(*x.shape[:-1], -1)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows `ids`."""
        return F.embedding(ids, self.weight)

    def part(self, first: int, end: int) -> TorchLinear:
        """Return the layer of outputs [first, end), over the same memory."""
        return TorchLinear(self.weight[first:end], None if self.bias is None else self.bias[first:end])


@dataclass(frozen=True, slots=True)
class TorchGrouped:
    """A `Grouped` in PyTorch. weight: [experts, out, in]; bias: [experts, out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        return out if self.bias is None else out.add_(self.bias[experts])

    def one(self, expert: int) -> TorchLinear:
        """Return one expert's layer, sharing memory."""
        return TorchLinear(self.weight[expert], None if self.bias is None else self.bias[expert])


def grouped_by_torch(each: Sequence[Gated | None]) -> GroupedGated | None:
    """Return grouped products of PyTorch's bfloat16 layers; None for other layers, or if some are on other ranks.

    Until the caller drops `each`, the weights are held twice."""
    layers = [(mlp.gate_up, mlp.down) for mlp in each if mlp is not None]
    if len(layers) < len(each) or not all(_groups(layer) for pair in layers for layer in pair):
        return None
    gate_up, down = (_stacked(cast("Sequence[TorchLinear]", layer)) for layer in zip(*layers, strict=True))
    return GroupedGated(gate_up, down, tuple(Gated(gate_up.one(i), down.one(i)) for i in range(len(each))))


def _groups(layer: Linear) -> bool:
    """Return whether grouped products take the sizes: rows of whole 16 bytes."""
    return (
        isinstance(layer, TorchLinear)
        and layer.weight.dtype is torch.bfloat16
        and not any(size % 8 for size in layer.weight.shape)
    )


def _stacked(layers: Sequence[TorchLinear]) -> TorchGrouped:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return TorchGrouped(torch.stack([layer.weight for layer in layers]), torch.stack(biases) if biases else None)


@dataclass(frozen=True, slots=True)
class TorchLinearOfHeads:
    """A `LinearOfHeads` in PyTorch."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) @ self.weight.transpose(1, 2)).transpose(0, 1)


class TorchShared(TorchRecurrent):
    """Implements `kernels.ops.DenseOps`, norms, activations, recurrent layers and sampling in PyTorch.

    For backends without their own."""

    capabilities = Capabilities()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return TorchLinear(weight, bias)

    def linear_of_heads(self, weight: torch.Tensor) -> LinearOfHeads:
        return TorchLinearOfHeads(weight)

    def grouped(self, each: Sequence[Gated | None]) -> GroupedGated | None:
        return None

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> StoredLinear | None:
        return None

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> Step | None:
        return None

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, eps: float) -> torch.Tensor:
        return layer_norm(x, norm.weight, norm.bias, eps)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activate(x, activation)

    def add_low_rank(self, y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, parts: Sequence[LowRank]) -> None:
        add_low_rank(y, x, tokens, parts)

    def adjust(self, logits: torch.Tensor, rows: Sequence[Adjusted], drawn: torch.Tensor | None = None) -> None:
        for row, adjustments, output_len, behind in rows:
            last = None if drawn is None or behind < 0 else drawn[behind : behind + 1]
            adjustments.apply(logits[row], output_len, last)

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()
    ) -> torch.Tensor:
        return draw(logits, params, keys, masks)
