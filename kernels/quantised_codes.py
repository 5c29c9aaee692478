"""Quantised weights as integer (or fp8) codes with scales (Codes, Levels); a weight is its code times its scale.

Each backend that computes on such weights lays them out in its own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECE = 1 << 20
"""Weights computed at once: 4 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Number for each group of each output's inputs, such as a scale.

    `fine` [out, groups], times the `coarse` [out, groups / n] of n consecutive groups if there is one. 8-bit integers
    times float16 are exact in float32."""

    fine: torch.Tensor
    coarse: torch.Tensor | None = None

    @classmethod
    def laid(cls, parts: Sequence[Levels], outputs: int) -> Levels:
        """Concatenate parts and reshape them to `outputs` rows."""
        coarse = [part.coarse for part in parts if part.coarse is not None]
        fine = torch.cat([part.fine for part in parts]).view(outputs, -1)
        return cls(fine, torch.cat(coarse).view(outputs, -1) if coarse else None)

    @property
    def groups(self) -> int:
        """Number of groups of an output's inputs."""
        return self.fine.shape[1]

    @property
    def shared(self) -> int:
        """Number of groups per coarse number; 0 if there is none."""
        return 0 if self.coarse is None else self.groups // self.coarse.shape[1]

    @property
    def memory(self) -> int:
        """Size in bytes."""
        return self.fine.nbytes + (0 if self.coarse is None else self.coarse.nbytes)

    def numbers(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [n, groups] of outputs `ids`, int64 [n], or of all."""
        fine, coarse = (part if part is None or ids is None else part[ids] for part in (self.fine, self.coarse))
        assert fine is not None
        if coarse is None:
            return fine.float()
        return fine.float().view(*coarse.shape, -1).mul_(coarse.float()[..., None]).flatten(1)

    def alike(self, other: Levels | None) -> bool:
        """Return whether both may be rows of one layer."""
        return other is not None and self._kind == other._kind

    @property
    def _kind(self) -> tuple[torch.dtype, int]:
        return self.fine.dtype, self.shared


@dataclass(frozen=True, slots=True)
class Codes:
    """Quantised weight. values: [out, in], integers of at most 16 bits, or fp8.

    scales: float32; one for all, for each output, for each group of its inputs ([1 or out, groups]), or for blocks of
    (outputs, inputs). order: each input's group, if groups are not consecutive inputs."""

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
        """Number of consecutive inputs per scale; the last of blocks may have fewer."""
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
        """Return the codes on another device."""
        order = None if self.order is None else self.order.to(device)
        return Codes(self.values.to(device), self.scales.to(device), self.block, order)

    def write(self, out: torch.Tensor) -> None:
        """Write the weights into `out` [out, in] of any float dtype, on any device."""
        step = max(1, _PIECE // self.values.shape[1])
        for at in range(0, len(self.values), step):
            out[at : at + step] = self.weights(at, at + step)

    def weights(self, first: int, end: int) -> torch.Tensor:
        """Return the weights of outputs [first, end) in float32."""
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
    """Quantise a weight [out, in] to int8 with a scale per output, as the compiled kernels do.

    peaks: see `kernels.decoder_spec.StoredRows`."""
    peaks = (weight.abs().amax(1).float() if peaks is None else peaks)[:, None]
    steps = torch.full_like(peaks, 127)  # NaN, and not infinity, so that the inverse may be multiplied
    inverse = torch.where(peaks > 0, steps / peaks, 0.0)
    values, step = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), max(1, _PIECE // weight.shape[1])
    for at in range(0, len(weight), step):
        values[at : at + step] = (weight[at : at + step].float() * inverse[at : at + step]).round_()
    return Codes(values, peaks / steps)


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.aminmax()
    return codes.to(torch.int8) if low >= -128 and high <= 127 else codes
