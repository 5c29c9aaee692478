"""Packs quantised weight codes of 4 and 6 bits into bytes for GPU memory, and converts e2m1 (FP4) codes.

A tile of inputs is divided into spans of neighbours, and its bytes into spans of the same length."""

from __future__ import annotations

import torch

INT4, INT6, INT8, FP4, FP8 = "W4A16", "W6A16", "W8A16", "FP4", "FP8"
SPANS = {INT4: 2, FP4: 2, INT6: 4, INT8: 1, FP8: 1}
"""Spans of inputs in a tile, by kind."""
STORED = {INT4: 1, FP4: 1, INT6: 3, INT8: 1, FP8: 1}
"""Spans of bytes that hold a tile, by kind.

Four bits: each byte span holds two input spans, the lower bits first. Six bits: the third byte span holds the upper two
bits of all four input spans, lowest bits first."""
_E2M1 = 12
"""Twice the largest number of e2m1."""


def packed(kind: str, codes: torch.Tensor, tile: int) -> torch.Tensor:
    """Return codes uint8 [out, in] packed as uint8 [out, bytes]. Below eight bits, inputs must be whole tiles."""
    count = SPANS[kind]
    if count == 1:
        return codes.contiguous()
    spans = codes.view(len(codes), -1, count, tile // count)
    low = spans & 15
    found = low[:, :, ::2] | low[:, :, 1::2] << 4
    if kind == INT6:
        high = spans >> 4
        upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
        found = torch.cat((found, upper[:, :, None]), 2)
    return found.flatten(1)


def unpacked(kind: str, stored: torch.Tensor, tile: int) -> torch.Tensor:
    """Invert `packed`."""
    count = SPANS[kind]
    if count == 1:
        return stored
    spans = stored.view(len(stored), -1, STORED[kind], tile // count)
    halves = spans[:, :, : count // 2]
    codes = torch.stack((halves & 15, halves >> 4), 3).flatten(2, 3)
    if kind == INT6:
        upper = spans[:, :, 2]
        codes |= torch.stack([(upper >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 2)
    return codes.flatten(1)


def numbers_of_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return twice the numbers of these e2m1 codes, int8.

    codes: uint8 below 16: a sign and three bits, the lowest of them a fraction. Copies nothing from the host, since a
    copy would wait for the device."""
    low = (codes & 7).to(torch.int8)
    size = torch.where(low == 0, 0, (2 | low & 1) << (low >> 1) >> 1)
    return torch.where(codes < 8, size, -size)


def codes_of_e2m1(values: torch.Tensor) -> torch.Tensor | None:
    """Return the e2m1 codes, uint8, of integers that are twice their numbers; None if e2m1 lacks one of them."""
    low, high = values.aminmax()
    if max(-int(low), int(high)) > _E2M1:
        return None
    each = torch.arange(16, dtype=torch.uint8, device=values.device)
    numbers = numbers_of_e2m1(each).long()
    codes = torch.full((2 * _E2M1 + 1,), 255, dtype=torch.uint8, device=values.device)
    codes[numbers + _E2M1] = each * (numbers != 0)
    found = codes[values.long() + _E2M1]
    return None if bool((found == 255).any()) else found
