"""Quantised weights as codes and scales; a weight is its code times its scale.

Each backend that computes on such weights lays them out in its own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECE = 1 << 20
"""Weights that are computed at once: 4 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Levels:
    """A number for each group of each output's inputs: `fine` [out, groups], times, where there is one, the `coarse`
    [out, groups / n] of n neighbouring groups. Integers of eight bits times float16 are exact in float32."""

    fine: torch.Tensor
    coarse: torch.Tensor | None = None

    @classmethod
    def laid(cls, parts: Sequence[Levels], outputs: int) -> Levels:
        """Parts that go on where the one before ends, as rows of so many outputs."""
        coarse = [part.coarse for part in parts if part.coarse is not None]
        fine = torch.cat([part.fine for part in parts]).view(outputs, -1)
        return cls(fine, torch.cat(coarse).view(outputs, -1) if coarse else None)

    @property
    def groups(self) -> int:
        return self.fine.shape[1]

    @property
    def shared(self) -> int:
        """Groups of a coarse number; 0: there is none."""
        return 0 if self.coarse is None else self.groups // self.coarse.shape[1]

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.fine.nbytes + (0 if self.coarse is None else self.coarse.nbytes)

    def numbers(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [n, groups] of outputs `ids`, int64 [n], or of all."""
        fine, coarse = (part if part is None or ids is None else part[ids] for part in (self.fine, self.coarse))
        assert fine is not None
        if coarse is None:
            return fine.float()
        return fine.float().view(*coarse.shape, -1).mul_(coarse.float()[..., None]).flatten(1)

    def alike(self, other: Levels | None) -> bool:
        """Both may be rows of one layer."""
        return other is not None and self._kind == other._kind

    @property
    def _kind(self) -> tuple[torch.dtype, int]:
        return self.fine.dtype, self.shared


@dataclass(frozen=True, slots=True)
class Codes:
    """values [out, in]: integers of at most 16 bits, or fp8.

    scales: float32; of all, of each output, of each group of its inputs: [1 or out, groups], or of blocks of (outputs,
    inputs). order: each input's group, where groups are not neighbours."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int] | None = None
    order: torch.Tensor | None = None

    @classmethod
    def offset(
        cls, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor | None
    ) -> Codes:
        """Build codes [out, in] with zero points [1 or out, 1 or groups], which are subtracted."""
        if zeros.shape[1] == 1:
            return cls(_narrow(codes.to(torch.int16) - zeros), scales, order=order)
        if order is not None:
            return cls(_narrow(codes.to(torch.int16) - zeros[:, order]), scales, order=order)
        grouped = codes.view(len(codes), zeros.shape[1], -1).to(torch.int16)
        return cls(_narrow((grouped - zeros[..., None]).flatten(1)), scales)

    @property
    def group(self) -> int:
        """Inputs of one scale, where groups are neighbours; the last of blocks may have fewer."""
        return self.block[1] if self.block is not None else self.values.shape[1] // self.scales.shape[1]

    def by_output(self) -> Codes:
        """Return the same with memory of its own, and scales of each output [out, groups]."""
        count, scales = len(self.values), self.scales
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[0], 0)[:count]
        scales = scales.expand(count, -1).contiguous()
        block = None if self.block is None else (1, self.block[1])
        return Codes(self.values.clone(), scales, block, self.order)

    def to(self, device: torch.device) -> Codes:
        order = None if self.order is None else self.order.to(device)
        return Codes(self.values.to(device), self.scales.to(device), self.block, order)

    def write(self, out: torch.Tensor) -> None:
        """The weights, into `out` [out, in] of any float dtype, on any device."""
        step = max(1, _PIECE // self.values.shape[1])
        for at in range(0, len(self.values), step):
            out[at : at + step] = self.weights(at, at + step)

    def weights(self, first: int, end: int) -> torch.Tensor:
        """float32 of outputs [first, end)."""
        values = self.values[first:end].float()
        if self.block is not None:
            device = values.device
            outputs = torch.arange(first, first + len(values), device=device) // self.block[0]
            inputs = torch.arange(values.shape[1], device=device) // self.block[1]
            return values.mul_(self.scales[outputs][:, inputs])
        scales = self.scales if len(self.scales) == 1 else self.scales[first:end]
        if self.order is not None:
            return values.mul_(scales[:, self.order])
        return values.view(len(values), scales.shape[1], -1).mul_(scales[..., None]).flatten(1)


def int8_of(weight: torch.Tensor, peaks: torch.Tensor | None = None) -> Codes:
    """A weight [out, in] in the nearest integers of eight bits with a scale an output: as the compiled kernels make
    them. peaks: see `kernels.decoder_spec.StoredRows`."""
    peaks = (weight.abs().amax(1).float() if peaks is None else peaks)[:, None]
    most = torch.full_like(peaks, 127)  # not a number: that may be multiplied by an inverse
    inverse = torch.where(peaks > 0, most / peaks, 0.0)
    values, step = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), max(1, _PIECE // weight.shape[1])
    for at in range(0, len(weight), step):
        values[at : at + step] = (weight[at : at + step].float() * inverse[at : at + step]).round_()
    return Codes(values, peaks / most)


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.aminmax()
    return codes.to(torch.int8) if low >= -128 and high <= 127 else codes
