"""Unpacks MXFP4 weights into codes with scales: e2m1 numbers with a shared power of two per 32 inputs.

The format is the Open Compute Project's (Microscaling Formats 1.0). Twice an e2m1 value is an integer."""

from __future__ import annotations

import torch

from kvferry.kernels.quantised_codes import Codes

RUN = 32
"""Inputs per scale."""
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_MANTISSA = 23
"""Bits of a float32 below its exponent, whose offset is that of MXFP4's scales."""


def codes_of(halves: torch.Tensor, scales: torch.Tensor) -> Codes:
    """Return the codes of halves [out, in], four bits in each byte, with scales [out, in / RUN], exponents in bytes."""
    halved = (scales.int() - 1).clamp_(min=0) << _MANTISSA
    return Codes(_DOUBLED[halves.int()], halved.view(torch.float32))


def codes_of_blocks(blocks: torch.Tensor) -> Codes:
    """Return the codes of a GGUF's rows [out, blocks, 17]: a block is a scale, then inputs, first half in low bits."""
    packed = blocks[..., 1:]
    halves = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
    return codes_of(halves, blocks[..., 0])
