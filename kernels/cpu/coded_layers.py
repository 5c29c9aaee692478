"""Converts quantised weights (codes with scales) into rows that the CPU kernels multiply: GGUF blocks or int8.

Integers of up to eight bits with a scale for each 32 inputs or more keep their values: as Q4_0, Q5_0 or Q8_0 of GGUF,
the smallest that holds them, or with one scale per output. All others (fp8, groups of fewer inputs or in an order of
their own) become the nearest 8-bit integers with a scale for each 32 inputs, off by at most 1 / 254 of a run's largest
value."""

from __future__ import annotations

import torch

from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.quantised_codes import Codes, int8_of

RUN = 32
"""Inputs per scale in GGUF's small blocks."""
_PIECE = 1 << 20
"""Weights computed at once: 4 MiB of float32."""


def rows_of(codes: Codes) -> StoredRows | None:
    """Return the rows in the nearest form that products take; None if their inputs are not whole runs."""
    values, scales = codes.values, codes.scales
    (count, columns), groups = values.shape, scales.shape[1]
    if columns % RUN:
        return None
    plain = codes.block is None and codes.order is None and not values.is_floating_point()
    if not plain or columns % groups or columns // groups % RUN:
        return _nearest(codes)
    low, high = map(int, values.aminmax())
    if low < -128 or high > 127:
        return _nearest(codes)
    if groups == 1 and (low < -16 or high > 15):
        return _signed(values, scales.expand(count, 1).contiguous())
    scales = scales.repeat_interleave(columns // RUN // groups, 1).expand(count, -1)
    return _blocks(values, scales, low, high)


def packable(rows: StoredRows) -> StoredRows:
    """Quantise as the kernels do; if some inputs are on other ranks, with the scales of whole rows."""
    if rows.peaks is None:
        return rows
    codes = int8_of(rows.data.view(torch.bfloat16), rows.peaks)
    return _signed(codes.values, codes.scales)


def _signed(values: torch.Tensor, scales: torch.Tensor) -> StoredRows:
    return StoredRows("CODES", torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), 1))


def _nearest(codes: Codes) -> StoredRows:
    count, columns = codes.values.shape
    data, step = torch.empty(count, columns // RUN * 34, dtype=torch.uint8), max(1, _PIECE // columns)
    for at in range(0, count, step):
        weights = codes.weights(at, at + step).view(-1, columns // RUN, RUN)
        scales = (weights.abs().amax(-1) / 127).half()
        exact = scales.float()[..., None]
        near = (weights / exact.where(exact > 0, 1.0)).round_().clamp_(-127, 127).to(torch.int8)
        data[at : at + step] = _q8_0(near, scales)
    return StoredRows("Q8_0", data)


def _blocks(values: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> StoredRows:
    """Return rows in the smallest GGUF blocks that hold codes between low and high. scales: [out, in / RUN]."""
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
    """Return float16 [out, n] as bytes [out, n, 2]."""
    return scales.contiguous().view(torch.uint8).view(*scales.shape, 2)
