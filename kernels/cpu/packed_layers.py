"""PackedLinear: dense layers whose plain or quantised weights are packed once for the CPU kernels.

They are as fast as PyTorch (oneDNN) or faster for any number of rows (benchmarks/cpu_kernels.py), so the plain weight
is not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.coded_layers import packable, rows_of
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.linear import Linear, LinearOfHeads
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.torch_operations import TorchLinear, TorchLinearOfHeads

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels, Place

_PANEL = 32


class PackedLinear:
    """Implements `kernels.linear.StoredLinear` for bfloat16 x [n, in] over stored rows [.., in].

    BF16 is multiplied as it is. For all other kinds x is quantised to int8 per row and 32 inputs. A row's result does
    not depend on the other rows."""

    __slots__ = ("in_features", "kernels", "kinds", "out_features", "weights")

    def __init__(self, kernels: Kernels, parts: Sequence[StoredRows], columns: int, bias: torch.Tensor | None):
        self.kernels = kernels
        self.in_features, self.out_features = columns, sum(len(part.data) for part in parts)
        self.kinds = frozenset(part.kind for part in parts)
        stored = [(part.kind, part.data) for part in map(packable, parts)]
        self.weights = kernels.pack(stored, columns, None if bias is None else bias.float())

    @classmethod
    def placed(cls, kernels: Kernels, place: Place) -> PackedLinear:
        """Return a layer that lies in the file that the kernels map."""
        found = cls.__new__(cls)
        found.kernels, found.weights = kernels, kernels.placed(place)
        found.in_features, found.out_features = place[:2]
        found.kinds = frozenset()
        return found

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=dtype or x.dtype)
        self.kernels.dense(self.weights, x, out)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), self.in_features, dtype=torch.bfloat16)
        self.kernels.lookup(self.weights, ids, out)
        return out


@dataclass(frozen=True, slots=True)
class PackedLinearOfHeads:
    """A `LinearOfHeads` whose layers lie one after the other, each padded to whole panels."""

    heads: PackedLinear
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(*x.shape[:2], self.out_features, dtype=x.dtype)
        self.heads.kernels.dense_of_heads(self.heads.weights, x, out)
        return out


def plain_rows(weight: torch.Tensor) -> StoredRows | None:
    """Return a bfloat16 weight [out, in] as rows to pack; None if the kernels do not pack it."""
    if weight.dtype != torch.bfloat16 or weight.shape[1] % 2 or not weight.is_contiguous():
        return None
    return StoredRows("BF16", weight.view(torch.uint8))


def whole_panels(parts: Sequence[StoredRows]) -> bool:
    """Return whether each part begins a panel."""
    return all(len(part.data) % _PANEL == 0 for part in parts[:-1])


class PackedLayers:
    """Implements `kernels.ops.DenseOps` with packed layers, which are made once at load.

    kernels: packs and runs the layers. row_bytes: bytes of a row of a kind with a number of inputs; negative if it is
    not packed."""

    def __init__(self, kernels: Kernels, row_bytes: Callable[[str, int], int]) -> None:
        self.kernels = kernels
        self._row_bytes = row_bytes

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        rows = plain_rows(weight)
        if rows is None:
            return TorchLinear(weight, bias)
        return PackedLinear(self.kernels, [rows], weight.shape[1], bias)

    def linear_of_heads(self, weight: torch.Tensor) -> LinearOfHeads:
        each = weight.shape[1]
        heads = self.linear(F.pad(weight, (0, 0, 0, -each % _PANEL)).flatten(0, 1).contiguous())
        return PackedLinearOfHeads(heads, each) if isinstance(heads, PackedLinear) else TorchLinearOfHeads(weight)

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> PackedLinear | None:
        rows = [found for part in parts if (found := rows_of(part) if isinstance(part, Codes) else part) is not None]
        if len(rows) < len(parts) or not whole_panels(rows):
            return None
        if any(self._row_bytes(part.kind, columns) < 0 for part in rows):
            return None
        return PackedLinear(self.kernels, rows, columns, bias)
