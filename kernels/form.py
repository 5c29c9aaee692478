"""Codes as they lie in a GPU's memory, without Triton: four bits where those of each group are neighbours enough or
numbers of e2m1, or eight. Nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.codes import Codes

INT4, INT8, FP4, FP8 = "W4A16", "W8A16", "FP4", "FP8"
_HALVES = (INT4, FP4)
"""Kinds of four bits."""
_NIBBLES, _BYTES = 15, 255
"""How far codes of four and of eight bits are apart at most."""
_MIDDLE = 8
"""Of codes of four bits with neither offsets nor minima."""
_E2M1 = 12
"""Twice the largest number of e2m1."""
_EXACT = 256
"""Integers up to it are numbers of bfloat16."""
_TILE = 128


@dataclass(frozen=True, slots=True)
class CodedForm:
    """codes: uint8 [out, in], or [out, in / 2] of four bits, where a byte of each `tile` inputs has one of its first
    half in its lower four bits, and the one that lies half a tile behind. scales: float16 or float32 [out, groups],
    each of `group` neighbouring inputs; a tile, or each half of one of four bits, lies within a group. offsets: int16
    [out, groups], what is added to codes, or None. minima: float16 or float32 [out, groups], what is added to codes
    times scales, or None. Codes of INT4 lie 8 above theirs where there is neither. order: int64 [in], the input that
    stands at each place, or None: all stand at their own."""

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    minima: torch.Tensor | None
    group: int
    tile: int
    order: torch.Tensor | None

    @property
    def unit(self) -> int:
        """Inputs of a tile that belong to one group."""
        return self.tile if self.scales.shape[1] == 1 else min(self.tile, _tile(self.group))

    @property
    def memory(self) -> int:
        """Bytes."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets, self.minima) if part is not None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] of outputs `ids`, int64 [n]."""
        codes = self.codes[ids]
        if self.kind == FP8:
            values = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == INT8:
            values = codes.view(torch.int8).float()
        else:
            halves = codes.view(len(ids), -1, self.tile // 2)
            values = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
            if self.kind == FP4:
                values = _numbers(values).float()
            else:
                values = values.float().sub_(_MIDDLE if self.offsets is None and self.minima is None else 0)
        columns = torch.arange(values.shape[1], device=values.device) // self.group
        if self.offsets is not None:
            values += self.offsets[ids][:, columns]
        values *= self.scales[ids].float()[:, columns]
        if self.minima is not None:
            values += self.minima[ids].float()[:, columns]
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def joins(self, other: CodedForm) -> bool:
        """Both are rows of one layer."""
        plain = ("kind", "group", "tile")
        orders = self.order is None, other.order is None
        same_order = all(orders) or (not any(orders) and torch.equal(self.order, other.order))  # type: ignore[arg-type]
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and (self.offsets is None) == (other.offsets is None)
            and self.scales.dtype == other.scales.dtype
            and getattr(self.minima, "dtype", None) == getattr(other.minima, "dtype", None)
            and same_order
        )


def form_of(codes: Codes, minima: torch.Tensor | None = None) -> CodedForm | None:
    """On the device of the codes. minima: float32 [out, groups], which are added to codes times scales; codes are
    integers then, below 0 for none. None: they are of another kind, or their groups are no whole tiles."""
    own, columns = codes.by_output(), codes.values.shape[1]
    order, values = None, own.values
    if codes.order is not None:
        order = codes.order.argsort(stable=True)
        if columns % codes.scales.shape[1] or bool((codes.order.bincount() != codes.group).any()):
            return None
        values = values[:, order]
    group = codes.group
    if values.dtype == torch.float8_e4m3fn:
        kind, laid, offsets = FP8, values.view(torch.uint8), None
    elif values.is_floating_point() or columns % group:
        return None
    else:
        found = _integers(values, group) if minima is None else _above_minima(values)
        if found is None:
            return None
        kind, laid, offsets = found
    whole, halved = group >= columns, kind in _HALVES
    tile = _TILE if whole and not halved and minima is None else _tile(group)
    if tile < 16:
        return None
    if halved:
        tile = max(2 * 16, tile)
        if columns % tile:
            return None
        halves = laid.view(len(laid), -1, 2, tile // 2)
        laid = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    least = None if minima is None else _narrow(minima)
    return CodedForm(kind, laid.contiguous(), _narrow(own.scales), offsets, least, group, tile, order)


def laid_together(forms: Sequence[CodedForm]) -> list[CodedForm]:
    """Neighbours that are of one form as one."""
    bounds = [0, *(i for i, (a, b) in enumerate(pairwise(forms), 1) if not a.joins(b)), len(forms)]
    return [_joined(forms[first:end]) for first, end in pairwise(bounds)]


def _joined(forms: Sequence[CodedForm]) -> CodedForm:
    first = forms[0]
    offsets = [form.offsets for form in forms if form.offsets is not None]
    minima = [form.minima for form in forms if form.minima is not None]
    return CodedForm(
        first.kind,
        torch.cat([form.codes for form in forms]),
        torch.cat([form.scales for form in forms]),
        torch.cat(offsets) if offsets else None,
        torch.cat(minima) if minima else None,
        first.group,
        first.tile,
        first.order,
    )


def _integers(values: torch.Tensor, group: int) -> tuple[str, torch.Tensor, torch.Tensor | None] | None:
    """(kind, codes uint8 [out, in], offsets); None: they do not fit eight bits, or not bfloat16."""
    grouped = values.view(len(values), -1, group).to(torch.int16)
    low, high = grouped.aminmax(dim=-1)
    apart, least, most = int((high - low).max()), int(low.min()), int(high.max())
    if least >= -_MIDDLE and most < _MIDDLE:
        return INT4, (values + _MIDDLE).to(torch.uint8), None
    if apart <= _NIBBLES and max(-least, most) <= _EXACT:
        return INT4, (grouped - low[..., None]).to(torch.uint8).flatten(1), low
    if max(-least, most) <= _E2M1 and (codes := _e2m1(values)) is not None:
        return FP4, codes, None
    if least >= -128 and most <= 127:
        return INT8, values.to(torch.int8).view(torch.uint8), None
    if apart <= _BYTES and max(-least, most) <= _EXACT:
        middle = low + 128
        return INT8, (grouped - middle[..., None]).to(torch.int8).view(torch.uint8).flatten(1), middle
    return None


def _above_minima(values: torch.Tensor) -> tuple[str, torch.Tensor, None]:
    """As `_integers`, of codes from 0 to 127."""
    most = int(values.max())
    return (INT4 if most <= _NIBBLES else INT8), values.view(torch.uint8), None


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    """int8: twice the numbers of e2m1 of these codes, uint8 below 16: three bits, of which the lowest is a fraction,
    and a sign. Nothing is brought from the host, which would wait for the device."""
    low = (codes & 7).to(torch.int8)
    size = torch.where(low == 0, 0, (2 | low & 1) << (low >> 1) >> 1)
    return torch.where(codes < 8, size, -size)


def _e2m1(values: torch.Tensor) -> torch.Tensor | None:
    """uint8: the codes of twice these numbers; None: some are others."""
    each = torch.arange(16, dtype=torch.uint8, device=values.device)
    numbers = _numbers(each).long()
    codes = torch.full((2 * _E2M1 + 1,), 255, dtype=torch.uint8, device=values.device)
    codes[numbers + _E2M1] = each * (numbers != 0)
    found = codes[values.long() + _E2M1]
    return None if bool((found == 255).any()) else found


def _tile(group: int) -> int:
    """The largest power of two of inputs that belong to one group, up to `_TILE`."""
    return min(_TILE, group & -group)


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """In 16 bits, where these hold them."""
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales) else scales
