"""Codes as they lie in a GPU's memory, without Triton: four bits where those of each group are neighbours enough, or
eight. Nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.codes import Codes

INT4, INT8, FP8 = "W4A16", "W8A16", "FP8"
_NIBBLES, _BYTES = 15, 255
"""How far codes of four and of eight bits are apart at most."""
_MIDDLE = 8
"""Of codes of four bits without offsets."""
_EXACT = 256
"""Integers up to it are numbers of bfloat16."""
_TILE = 128


@dataclass(frozen=True, slots=True)
class CodedForm:
    """codes: uint8 [out, in], or [out, in / 2] of INT4, where a byte of each `tile` inputs has one of its first half
    in its lower four bits, and the one that lies half a tile behind. scales: float16 or float32 [out, groups], each of
    `group` neighbouring inputs. offsets: int16 [out, groups], what is added to codes, or None: of INT4, they lie 8
    above theirs. order: int64 [in], the input that stands at each place, or None: all stand at their own."""

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int
    tile: int
    order: torch.Tensor | None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] of outputs `ids`, int64 [n]."""
        codes = self.codes[ids]
        if self.kind == FP8:
            values = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == INT8:
            values = codes.view(torch.int8).float()
        else:
            halves = codes.view(len(ids), -1, self.tile // 2)
            values = torch.cat((halves & 15, halves >> 4), -1).flatten(1).float()
            values -= 0 if self.offsets is not None else _MIDDLE
        columns = torch.arange(values.shape[1], device=values.device) // self.group
        if self.offsets is not None:
            values += self.offsets[ids][:, columns]
        values *= self.scales[ids].float()[:, columns]
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
            and same_order
        )


def form_of(codes: Codes) -> CodedForm | None:
    """On the device of the codes. None: they are of another kind, or their groups are no whole tiles."""
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
        found = _integers(values, group)
        if found is None:
            return None
        kind, laid, offsets = found
    whole = group >= columns
    tile = _TILE if whole and kind != INT4 else _tile(group)
    if tile < (32 if kind == INT4 else 16):
        return None
    if kind == INT4:
        halves = laid.view(len(laid), -1, 2, tile // 2)
        laid = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return CodedForm(kind, laid.contiguous(), _narrow(own.scales), offsets, group, tile, order)


def int8_of(weight: torch.Tensor) -> Codes:
    """A weight [out, in] in the nearest integers of eight bits with a scale an output."""
    scales = weight.abs().amax(1, keepdim=True).float() / 127
    values = (weight.float() / scales.where(scales > 0, 1.0)).round_().to(torch.int8)
    return Codes(values, scales)


def laid_together(forms: Sequence[CodedForm]) -> list[CodedForm]:
    """Neighbours that are of one form as one."""
    bounds = [0, *(i for i, (a, b) in enumerate(pairwise(forms), 1) if not a.joins(b)), len(forms)]
    return [_joined(forms[first:end]) for first, end in pairwise(bounds)]


def _joined(forms: Sequence[CodedForm]) -> CodedForm:
    first = forms[0]
    offsets = [form.offsets for form in forms if form.offsets is not None]
    return CodedForm(
        first.kind,
        torch.cat([form.codes for form in forms]),
        torch.cat([form.scales for form in forms]),
        torch.cat(offsets) if offsets else None,
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
    if least >= -128 and most <= 127:
        return INT8, values.to(torch.int8).view(torch.uint8), None
    if apart <= _BYTES and max(-least, most) <= _EXACT:
        middle = low + 128
        return INT8, (grouped - middle[..., None]).to(torch.int8).view(torch.uint8).flatten(1), middle
    return None


def _tile(group: int) -> int:
    """The largest power of two of inputs that belong to one group, up to `_TILE`."""
    return min(_TILE, group & -group)


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """In 16 bits, where these hold them."""
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales) else scales
