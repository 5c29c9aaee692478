"""Choice of the form in which a dense layer runs: as stored, quantised at load, or in the model's number format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.linear import Linear, Scaled
from kvferry.kernels.ops import Ops


class DenseForms:
    """Forms of one model's dense layers.

    quantization: see `load_model`. `kept`: kinds of stored rows that run packed."""

    def __init__(self, ops: Ops, quantization: str) -> None:
        self.as_stored = quantization == "auto"
        self.int8 = quantization == "int8"
        self._ops = ops
        self.kept: set[str] = set()

    def of_rows(
        self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None, factor: float = 1.0
    ) -> Linear | None:
        """Build a layer from stored rows [.., columns]; None where the operations do not run them.

        factor: multiplies the layer's results."""
        packed = self._ops.packed(parts, columns, bias)
        if packed is None:
            return None
        self.kept |= packed.kinds
        return packed if factor == 1.0 else Scaled(packed, factor)

    def of_weight(self, weight: torch.Tensor, bias: torch.Tensor | None, peaks: torch.Tensor | None = None) -> Linear:
        """Build a layer from a contiguous weight [out, in]; bfloat16 where it is to become int8."""
        if self.int8:
            quantised: list[Stored] = [StoredRows("INT8", weight.view(torch.uint8), peaks)]
            if (packed := self.of_rows(quantised, weight.shape[1], bias)) is not None:
                return packed
        return self._ops.linear(weight, bias)
