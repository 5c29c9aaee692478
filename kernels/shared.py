"""What rows of the operations table share that have nothing of their own: dense layers and drawing by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.adjustments import Adjusted
from kernels.capabilities import Capabilities
from kernels.draw import NoiseKeys, draw
from kernels.low_rank import LowRank, add_low_rank
from kernels.masking import Masks
from kernels.step import DecoderForm, Linear, LinearOfHeads, OneByOne, Step, Stored, StoredLinear
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A `Linear` by PyTorch, in the weight's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(dtype or x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def part(self, first: int, end: int) -> TorchLinear:
        """Of outputs [first, end) alone, over the same memory."""
        return TorchLinear(self.weight[first:end], None if self.bias is None else self.bias[first:end])


@dataclass(frozen=True, slots=True)
class TorchLinearOfHeads:
    """A `LinearOfHeads` by PyTorch."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) @ self.weight.transpose(1, 2)).transpose(0, 1)


class TorchShared:
    """Dense layers and drawing by PyTorch, for rows of the table without their own."""

    capabilities = Capabilities()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return TorchLinear(weight, bias)

    def linear_of_heads(self, weight: torch.Tensor) -> LinearOfHeads:
        return TorchLinearOfHeads(weight)

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> StoredLinear | None:
        return None

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> Step | None:
        return None

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
