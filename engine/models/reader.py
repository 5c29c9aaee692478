"""TensorReader: reads a decoder's tensors, checks, concatenates and reorders them, and makes layers on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.dense_forms import DenseForms
from kvferry.engine.models.interleaved import LATENT_ROTATED, ROTATED, half_split, rotated_first
from kvferry.engine.models.weights import Weights
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.layer_norm import LayerNorm, Norm
from kvferry.kernels.linear import Linear
from kvferry.kernels.ops import Ops
from kvferry.model_files.recurrent import GatedDeltaSizes, MixerSizes

Rows = list[tuple[str, int]]
"""Tensors to concatenate: names and numbers of rows."""
Peaks = Callable[[str, tuple[int, int], torch.dtype], torch.Tensor | None]
"""Largest magnitudes [rows] of whole rows as read in the dtype, for a tensor [rows, columns] that is a part of them.

None if the tensor has whole rows."""


def whole_rows(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Return None: a `Peaks` for tensors that are not divided among ranks."""


class TensorReader:
    """Tensor reader of one decoder.

    quantization, kept: see `DenseForms`. Raises ConfigError: a tensor is missing or has another shape than the config
    says."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
        quantization: str = "none",
        peaks: Peaks = whole_rows,
    ):
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self._weights, self._peaks = weights, peaks
        self.device = device
        self._forms = DenseForms(ops, quantization)
        self.kept = self._forms.kept

    def dense(self, prefix: str, parts: Rows, columns: int, bias: bool, factor: float = 1.0) -> Linear:
        """Return the layer of tensors whose names follow the prefix."""
        biases = self.stack([(f"{prefix}.{name}.bias", rows) for name, rows in parts], None) if bias else None
        return self.linear([(f"{prefix}.{name}.weight", rows) for name, rows in parts], columns, biases, factor)

    def linear(self, parts: Rows, columns: int, bias: torch.Tensor | None = None, factor: float = 1.0) -> Linear:
        """Return the layer in the form that `quantization` names if the operations run it, else in the decoder's dtype.

        factor: multiplies its results."""
        if self._forms.as_stored:
            stored = [(name, self._weights.stored(name, (rows, columns))) for name, rows in parts]
            kept = [self._placed(name, rows) for name, rows in stored if rows is not None]
            if len(kept) == len(parts) and (packed := self._forms.of_rows(kept, columns, bias, factor)) is not None:
                return packed
        peaks = self._peaks_of(parts, columns, factor) if self._forms.int8 else None
        bias = bias if bias is None or factor == 1.0 else bias * factor
        return self._forms.of_weight(self.stack(parts, columns, factor), bias, peaks)

    def stacked(self, name: str, count: int, rows: int, columns: int) -> tuple[Linear, ...]:
        """Return the layers of one tensor [count, rows, columns]."""
        if self._forms.as_stored and self._weights.stored(f"{name}.0", (rows, columns)) is not None:
            return tuple(self.linear([(f"{name}.{index}", rows)], columns) for index in range(count))
        whole = torch.empty(count, rows, columns, dtype=self.dtype, device=self.device)
        self._weights.read(name, whole)
        return tuple(self._forms.of_weight(each, None) for each in whole)

    def norm(self, name: str, size: int, factor: float = 1.0) -> Norm:
        """Return a norm of the family's kind. factor: of its results."""
        family = self.config.family
        if family.unweighted:
            return LayerNorm(torch.full((size,), factor, dtype=self.dtype, device=self.device))
        weight = self.rms_norm(name, size, factor)
        if not family.centred:
            return weight
        return LayerNorm(weight, self.stack([(f"{name}.bias", size)], None, factor) if family.norm_bias else None)

    def rms_norm(self, name: str, size: int, factor: float = 1.0) -> torch.Tensor:
        """Return the weights of a norm; a family's offset is added in float32."""
        out = self.stack([(f"{name}.weight", size)], None)
        if (offset := self.config.family.norm_offset) or factor != 1.0:
            out = ((out.float() + offset) * factor).to(self.dtype)
        return out

    def ones(self, size: int) -> torch.Tensor:
        """Return the weights of a norm that has none."""
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def stack(self, parts: Rows, columns: int | None, factor: float = 1.0) -> torch.Tensor:
        """Return [sum of rows, columns], or one dimension.

        factor: multiplies the tensors in place of their results."""
        tail = () if columns is None else (columns,)
        out = torch.empty(sum(rows for _, rows in parts), *tail, dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts:
            self._weights.read(name, part := out[start : start + rows])
            self._reorder(name, part)
            start += rows
        return out if factor == 1.0 else out.mul_(factor)

    def parameter(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor that is not a dense layer's, in the decoder's dtype."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._weights.read(name, out)
        return out

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in float32, whatever the decoder's dtype is."""
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._weights.read(name, out)
        return out

    def _peaks_of(self, parts: Rows, columns: int, factor: float) -> torch.Tensor | None:
        found = [self._peaks(name, (rows, columns), self.dtype) for name, rows in parts]
        peaks = [each for each in found if each is not None]
        return torch.cat(peaks).mul_(factor).abs().float().to(self.device) if peaks else None

    def _placed(self, name: str, stored: Stored) -> Stored:
        """Return the rows in our order, on the device."""
        if isinstance(stored, StoredRows):
            self._reorder(name, stored.data)
        elif self._moves(name):
            stored = stored.by_output()
            self._reorder(name, stored.values.view(torch.uint8))
            self._reorder(name, stored.scales)
        return stored.to(self.device)

    def _reorder(self, name: str, rows: torch.Tensor) -> None:
        """Reorder rows in place: of q and k if the family rotates other dims than ours, and those of `row_order`."""
        if (order := self._order(name)) is not None:
            rows.copy_(rows[order.to(rows.device)])
            return
        if not self._moves(name):
            return
        if self.config.latent is not None:
            rotated_first(name, rows, self.config.latent)
        else:
            half_split(rows, self.config.head_dim, self.config.rope.dim)

    def _order(self, name: str) -> torch.Tensor | None:
        return None if self.config.hybrid is None else row_order(name, self.config.hybrid.sizes)

    def _moves(self, name: str) -> bool:
        if self._order(name) is not None:
            return True
        if self.config.latent is not None:
            return any(each in name for each in LATENT_ROTATED)
        return self.config.family.interleaved and any(each in name for each in ROTATED)


def row_order(name: str, sizes: MixerSizes | None) -> torch.Tensor | None:
    """Return the order in which a tensor's rows are read, int64 [rows]; None: as they are stored.

    Each key head has its own query, key, values and gates, or beta and decays, one after the other. The decoder has
    those of all heads together."""
    if not isinstance(sizes, GatedDeltaSizes) or not sizes.paired:
        return None
    shared = sizes.v_heads // sizes.k_heads
    if ".in_proj_qkvz." in name:
        return _by_kind(sizes.k_heads, [sizes.k_dim, sizes.k_dim, shared * sizes.v_dim, shared * sizes.v_dim])
    return _by_kind(sizes.k_heads, [shared, shared]) if ".in_proj_ba." in name else None


def _by_kind(heads: int, counts: list[int]) -> torch.Tensor:
    rows = torch.arange(heads * sum(counts)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, counts, 1)])
