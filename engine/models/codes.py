"""A quantised weight as codes and scales: its values, and its rows in a form that products take.

A code times its scale is a weight. Integers of up to eight bits with a scale for each 32 inputs or more have a form of
the same values: Q4_0, Q5_0 or Q8_0 of GGUF, whichever holds them, or one scale an output. All others (fp8, groups in an
order of their own or of fewer inputs) become the nearest integers of eight bits with a scale for each 32 inputs, at
most 1 / 254 of a run's largest away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.step import StoredRows

RUN = 32
"""Inputs of one scale in GGUF's small blocks."""
_PIECE = 1 << 20
"""Weights that are computed at once: 4 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Codes:
    """values [out, in]: integers of at most 16 bits, or fp8. scales: float32; of all, of each output, of each group of
    its inputs: [1 or out, groups], or of blocks of (outputs, inputs). order: each input's group, where groups are not
    neighbours."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int] | None = None
    order: torch.Tensor | None = None

    @classmethod
    def offset(
        cls, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor | None
    ) -> Codes:
        """Of codes [out, in] and their zero points [1 or out, 1 or groups], which are taken off."""
        if zeros.shape[1] == 1:
            return cls(_narrow(codes.to(torch.int16) - zeros), scales, order=order)
        if order is not None:
            return cls(_narrow(codes.to(torch.int16) - zeros[:, order]), scales, order=order)
        grouped = codes.view(len(codes), zeros.shape[1], -1).to(torch.int16)
        return cls(_narrow((grouped - zeros[..., None]).flatten(1)), scales)

    def write(self, out: torch.Tensor) -> None:
        """The weights, into `out` [out, in] of any float dtype, on any device."""
        step = max(1, _PIECE // self.values.shape[1])
        for at in range(0, len(self.values), step):
            out[at : at + step] = self._weights(at, at + step)

    def rows(self) -> StoredRows | None:
        """In the nearest form that products take; None: their inputs are no whole runs, which none does."""
        count, columns = self.values.shape
        integers, groups = not self.values.is_floating_point(), self.scales.shape[1]
        if columns % RUN:
            return None
        if not integers or self.block or self.order is not None or columns % groups or columns // groups % RUN:
            return self._nearest()
        low, high = map(int, self.values.aminmax())
        if low < -128 or high > 127:
            return self._nearest()
        if groups == 1 and (low < -16 or high > 15):
            scales = self.scales.expand(count, 1).contiguous()
            return StoredRows("CODES", torch.cat((scales.view(torch.uint8), self.values.view(torch.uint8)), 1))
        scales = self.scales.repeat_interleave(columns // RUN // groups, 1).expand(count, -1)
        return _blocks(self.values, scales, low, high)

    def _nearest(self) -> StoredRows:
        count, columns = self.values.shape
        data, step = torch.empty(count, columns // RUN * 34, dtype=torch.uint8), max(1, _PIECE // columns)
        for at in range(0, count, step):
            weights = self._weights(at, at + step).view(-1, columns // RUN, RUN)
            scales = (weights.abs().amax(-1) / 127).half()
            exact = scales.float()[..., None]
            codes = (weights / exact.where(exact > 0, 1.0)).round_().clamp_(-127, 127).to(torch.int8)
            data[at : at + step] = _q8_0(codes, scales)
        return StoredRows("Q8_0", data)

    def _weights(self, first: int, end: int) -> torch.Tensor:
        """float32 of outputs [first, end)."""
        values = self.values[first:end].float()
        if self.block is not None:
            outputs = torch.arange(first, first + len(values)) // self.block[0]
            inputs = torch.arange(values.shape[1]) // self.block[1]
            return values.mul_(self.scales[outputs][:, inputs])
        scales = self.scales if len(self.scales) == 1 else self.scales[first:end]
        if self.order is not None:
            return values.mul_(scales[:, self.order])
        return values.view(len(values), scales.shape[1], -1).mul_(scales[..., None]).flatten(1)


def of_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [.., n * 8 / bits] of bytes [.., n], whose lowest bits come first. Raises ValueError."""
    if bits == 8:
        return packed
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
    if bits != 3:
        raise ValueError(f"codes of {bits} bits")
    single = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    parts = single.view(*single.shape[:-1], -1, 3)
    return parts[..., 0] | parts[..., 1] << 1 | parts[..., 2] << 2


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.aminmax()
    return codes.to(torch.int8) if low >= -128 and high <= 127 else codes


def _blocks(values: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> StoredRows:
    """Rows of GGUF's smallest blocks that hold codes between low and high; scales [out, in / RUN]."""
    codes, halves = values.view(len(values), -1, RUN), scales.half()
    if low < -16 or high > 15:
        return StoredRows("Q8_0", _q8_0(codes, halves))
    wide = low < -8 or high > 7
    raised = (codes + (16 if wide else 8)).to(torch.uint8)
    parts = [_bytes_of(halves)]
    if wide:
        fifths = (raised >> 4).view(*raised.shape[:2], 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.append(fifths.sum(-1, dtype=torch.uint8))
    parts.append((raised[..., :16] & 15) | (raised[..., 16:] & 15) << 4)
    return StoredRows("Q5_0" if wide else "Q4_0", torch.cat(parts, -1).flatten(1))


def _q8_0(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.cat((_bytes_of(scales), codes.view(torch.uint8)), -1).flatten(1)


def _bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """float16 [out, n] as bytes [out, n, 2]."""
    return scales.contiguous().view(torch.uint8).view(*scales.shape, 2)
