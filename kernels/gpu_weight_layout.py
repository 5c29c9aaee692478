"""CodedForm: layout of quantised weights in GPU memory, as codes of 4, 6 or 8 bits or e2m1, without rounding.

This module does not need Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvferry.kernels.bit_packing import (
    FP4,
    FP8,
    INT4,
    INT6,
    INT8,
    SPANS,
    codes_of_e2m1,
    numbers_of_e2m1,
    packed,
    unpacked,
)
from kvferry.kernels.decoder_spec import Stored
from kvferry.kernels.gguf_blocks import FORMATS, unpack_rows
from kvferry.kernels.quantised_codes import Codes, Levels, int8_of

_NIBBLES, _SIXES, _BYTES = 15, 63, 255
"""Largest difference between two codes of four, six and eight bits."""
_MIDDLES = {INT4: 8, INT6: 32}
"""Offset of four- and six-bit codes that have neither offsets nor minima."""
_SPAN = 16
"""Fewest inputs that tensor cores multiply."""
_EXACT = 256
"""Largest integer up to which all integers are exact in bfloat16."""
_TILE = 128
Found = tuple[str, torch.Tensor, torch.Tensor | None]
"""Kind, codes uint8 [out, in], and offsets as in `CodedForm`."""


@dataclass(frozen=True, slots=True)
class CodedForm:
    """Quantised weight in GPU memory.

    codes: uint8 [out, in]; below eight bits packed by `tile` inputs (`kernels/bit_packing.py`). scales: [out, groups],
    one for `group` consecutive inputs; each span of a tile lies within a group. offsets: int16 [out, groups], added to
    codes, or None. minima: [out, groups], added to codes times scales, or None. With neither, codes of four and six
    bits are stored plus 8 and 32. order: int64 [in], the input at each place, or None if all are in place."""

    kind: str
    codes: torch.Tensor
    scales: Levels
    offsets: torch.Tensor | None
    minima: Levels | None
    group: int
    tile: int
    order: torch.Tensor | None

    @property
    def unit(self) -> int:
        """Number of inputs of a tile that belong to one group."""
        return self.tile if self.scales.groups == 1 else min(self.tile, _tile(self.group))

    @property
    def memory(self) -> int:
        """Size in bytes."""
        levels = sum(part.memory for part in (self.scales, self.minima) if part is not None)
        return levels + sum(part.nbytes for part in (self.codes, self.offsets) if part is not None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, in]: outputs `ids`, int64 [n]."""
        codes = unpacked(self.kind, self.codes[ids], self.tile)
        if self.kind == FP8:
            values = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == INT8:
            values = codes.view(torch.int8).float()
        elif self.kind == FP4:
            values = numbers_of_e2m1(codes).float()
        else:
            values = codes.float().sub_(_MIDDLES[self.kind] if self.offsets is None and self.minima is None else 0)
        columns = torch.arange(values.shape[1], device=values.device) // self.group
        if self.offsets is not None:
            values += self.offsets[ids][:, columns]
        values *= self.scales.numbers(ids)[:, columns]
        if self.minima is not None:
            values += self.minima.numbers(ids)[:, columns]
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def joins(self, other: CodedForm) -> bool:
        """Return whether both can be rows of one layer."""
        plain = ("kind", "group", "tile")
        orders = self.order is None, other.order is None
        same_order = all(orders) or (not any(orders) and torch.equal(self.order, other.order))  # type: ignore[arg-type]
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and (self.offsets is None) == (other.offsets is None)
            and self.scales.alike(other.scales)
            and (other.minima is None if self.minima is None else self.minima.alike(other.minima))
            and same_order
        )


def form_of(codes: Codes) -> CodedForm | None:
    """Return the form on the codes' device; None for other kinds, or if groups are not whole tiles."""
    own, columns = codes.by_output(), codes.values.shape[1]
    order, values, scales = None, own.values, Levels(_narrow(own.scales))
    if codes.order is not None:
        order = codes.order.argsort(stable=True)
        if columns % codes.scales.shape[1] or bool((codes.order.bincount() != codes.group).any()):
            return None
        values = values[:, order]
    if values.dtype == torch.float8_e4m3fn:
        return _laid((FP8, values.view(torch.uint8), None), scales, None, codes.group, order)
    if values.is_floating_point() or columns % codes.group:
        return None
    return _laid(_integers(values, codes.group), scales, None, codes.group, order)


def form_of_stored(part: Stored) -> CodedForm | None:
    """Return the form of stored rows as `form_of` does; INT8 rows are quantised."""
    if isinstance(part, Codes):
        return form_of(part)
    if part.kind in FORMATS:
        values, scales, minima = unpack_rows(part)
        group = values.shape[1] // scales.groups
        return _laid(
            _integers(values, group) if minima is None else _above_minima(values, group), scales, minima, group
        )
    return form_of(int8_of(part.data.view(torch.bfloat16), part.peaks)) if part.kind == "INT8" else None


def _laid(
    found: Found | None, scales: Levels, minima: Levels | None, group: int, order: torch.Tensor | None = None
) -> CodedForm | None:
    """Return the codes as they lie in memory, or None."""
    if found is None:
        return None
    assert minima is None or minima.shared == scales.shared
    kind, codes, offsets = found
    columns, spans = codes.shape[1], SPANS[kind]
    tile = _TILE if group >= columns and spans == 1 and minima is None else _tile(group)
    if tile < _SPAN:
        return None
    tile = max(spans * _SPAN, tile)
    if spans > 1 and columns % tile:
        return None
    return CodedForm(kind, packed(kind, codes, tile), scales, offsets, minima, group, tile, order)


def join_forms(forms: Sequence[CodedForm]) -> list[CodedForm]:
    """Join consecutive weights of one form."""
    bounds = [0, *(i for i, (a, b) in enumerate(pairwise(forms), 1) if not a.joins(b)), len(forms)]
    return [_joined(forms[first:end]) for first, end in pairwise(bounds)]


def _joined(forms: Sequence[CodedForm]) -> CodedForm:
    first = forms[0]
    offsets = [form.offsets for form in forms if form.offsets is not None]
    minima = [form.minima for form in forms if form.minima is not None]
    codes = torch.cat([form.codes for form in forms])
    return CodedForm(
        first.kind,
        codes,
        Levels.laid([form.scales for form in forms], len(codes)),
        torch.cat(offsets) if offsets else None,
        Levels.laid(minima, len(codes)) if minima else None,
        first.group,
        first.tile,
        first.order,
    )


def _integers(values: torch.Tensor, group: int) -> Found | None:
    """Return codes that fit eight bits and bfloat16, with their offsets; None if they do not."""
    grouped = values.view(len(values), -1, group).to(torch.int16)
    low, high = grouped.aminmax(dim=-1)
    spread, lowest, highest = int((high - low).max()), int(low.min()), int(high.max())
    if lowest >= -8 and highest < 8:
        return INT4, (values + 8).to(torch.uint8), None
    if spread <= _NIBBLES and max(-lowest, highest) <= _EXACT:
        return INT4, (grouped - low[..., None]).to(torch.uint8).flatten(1), low
    if (codes := codes_of_e2m1(values)) is not None:
        return FP4, codes, None
    if lowest >= -32 and highest < 32 and _in_sixes(values, group):
        return INT6, (values + 32).to(torch.uint8), None
    if lowest >= -128 and highest <= 127:
        return INT8, values.to(torch.int8).view(torch.uint8), None
    if spread <= _BYTES and max(-lowest, highest) <= _EXACT:
        middle = low + 128
        return INT8, (grouped - middle[..., None]).to(torch.int8).view(torch.uint8).flatten(1), middle
    return None


def _above_minima(values: torch.Tensor, group: int) -> Found:
    """Return codes from 0 to 127 with offsets."""
    highest = int(values.max())
    six = INT6 if highest <= _SIXES and _in_sixes(values, group) else INT8
    return (INT4 if highest <= _NIBBLES else six), values.view(torch.uint8), None


def _in_sixes(values: torch.Tensor, group: int) -> bool:
    """Return whether inputs are whole tiles of six-bit codes."""
    return values.shape[1] % max(SPANS[INT6] * _SPAN, _tile(group)) == 0


def _tile(group: int) -> int:
    """Return the largest power of two of inputs that belong to one group, up to `_TILE`."""
    return min(_TILE, group & -group)


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales in 16 bits if these hold them."""
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales) else scales
