"""Unpacks GGUF block formats (Q4_0 to IQ4_XS, ggml's `ggml-common.h`) into integer codes, scales and minima.

A weight is its code times the scale, plus the minimum, in float32. Scales and minima of blocks of 256 are 8-bit
integers times a float16 of the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.quantised_codes import Levels

_PIECE = 1 << 20
"""Weights unpacked at once: 4 MiB of float32."""
Parts = tuple[torch.Tensor, Levels, Levels | None]
"""Codes, scales and minima of n blocks.

Codes: float32 [n, groups, inputs of a group], 8-bit integers. Scales: [n, groups]. Minima: the same shape, or None."""


@dataclass(frozen=True, slots=True)
class Format:
    """Block format. size: weights of a block. bytes: of a block. apart: unpacks blocks, uint8 [n, bytes]."""

    size: int
    bytes: int
    apart: Callable[[torch.Tensor], Parts]

    def values(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, size] for blocks [n, bytes]."""
        codes, scales, minima = self.apart(blocks)
        codes.mul_(scales.numbers()[..., None])
        return (codes if minima is None else codes.add_(minima.numbers()[..., None])).flatten(1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte `start` of each block, [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _plain(blocks: torch.Tensor, start: int) -> Levels:
    """Return the float16 at `start` of blocks that are one group."""
    return Levels(_half(blocks, start))


def _bits(packed: torch.Tensor, *shifts: int) -> torch.Tensor:
    """Return the bytes shifted right by each of `shifts`."""
    return torch.tensor(shifts, dtype=torch.uint8, device=packed.device)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., k] as float32 [..., 2, k]: low nibbles, then high ones."""
    out = torch.empty(*packed.shape[:-1], 2, packed.shape[-1], device=packed.device)
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4
    return out


def _run(packed: torch.Tensor) -> torch.Tensor:
    """Return 16 bytes of a block as float32 [n, 1, 32]."""
    return _nibbles(packed).view(-1, 1, 32)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _run(blocks[:, 2:]).sub_(8), _plain(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _run(blocks[:, 4:]), _plain(blocks, 0), _plain(blocks, 2)


def _fives(fifths: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Return fifth bits [n, 4] and bytes of nibbles [n, 16] as float32 [n, 1, 32]."""
    bits = (fifths[:, :, None] >> _bits(fifths, *range(8))) & 1
    return _run(halves).add_(bits.view(-1, 1, 32), alpha=16)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _fives(blocks[:, 2:6], blocks[:, 6:]).sub_(16), _plain(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _fives(blocks[:, 4:8], blocks[:, 8:]), _plain(blocks, 0), _plain(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, None, 2:].view(torch.int8).float(), _plain(blocks, 0), None


def _scales_and_minima(blocks: torch.Tensor) -> tuple[Levels, Levels]:
    """Return scales and minima, [n, 8] each, from two float16 and 12 bytes with eight pairs of 6 bits.

    The low six bits of bytes 0-3 and 4-7 are the first four of each. Nibbles of bytes 8-11 with the top two bits of
    bytes 0-3 and 4-7 are the last four of each."""
    scales, mins, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    high_scales = (rest & 15) | ((scales >> 2) & 0x30)
    high_mins = (rest >> 4) | ((mins >> 2) & 0x30)
    whole_scales, whole_mins = torch.cat((scales & 63, high_scales), 1), torch.cat((mins & 63, high_mins), 1)
    return Levels(whole_scales, _half(blocks, 0)), Levels(whole_mins, -_half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2), *_scales_and_minima(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    values = _nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    fifth = (blocks[:, None, 16:48] >> _bits(blocks, *range(8))[:, None]) & 1
    return values.add_(fifth, alpha=16), *_scales_and_minima(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> _bits(blocks, 0, 2, 4, 6)[:, None]) & 3
    values = low.add_(high, alpha=16).sub_(32).view(-1, 16, 16)
    return values, Levels(blocks[:, 192:208].view(torch.int8), _half(blocks, 208)), None


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return 64 bytes of 2-bit codes as float32 [n, 16, 16]: byte l of each 32 holds those of inputs l, 32 + l, ..."""
    return ((packed.view(-1, 2, 1, 32) >> _bits(packed, 0, 2, 4, 6)[:, None]) & 3).view(-1, 16, 16).float()


def _q2_k(blocks: torch.Tensor) -> Parts:
    scales, mins = Levels(blocks[:, :16] & 15, _half(blocks, 80)), Levels(blocks[:, :16] >> 4, -_half(blocks, 82))
    return _pairs(blocks[:, 16:80].contiguous()), scales, mins


def _q3_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[:, 96:104]).flatten(1)
    high = (blocks[:, None, 104:108] >> _bits(blocks, 0, 2, 4, 6)[:, None]) & 3
    scales = Levels(low.add_(high.flatten(1), alpha=16).sub_(32).to(torch.int8), _half(blocks, 108))
    thirds = (blocks[:, None, :32] >> _bits(blocks, *range(8))[:, None]) & 1
    return _pairs(blocks[:, 32:96].contiguous()).add_(thirds.view(-1, 16, 16), alpha=4).sub_(4), scales, None


_IQ4 = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.float32)
"""Values of the sixteen codes of IQ4."""


def _of_table(nibbles: torch.Tensor) -> torch.Tensor:
    return _IQ4.to(nibbles.device)[nibbles.long()]


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _of_table(_run(blocks[:, 2:])), _plain(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    high = ((blocks[:, 2:4, None] >> _bits(blocks, 0, 2, 4, 6)) & 3).flatten(1)
    scales = _nibbles(blocks[:, 4:8, None]).flatten(1).add_(high, alpha=16).sub_(32).to(torch.int8)
    return _of_table(_nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(2)), Levels(scales, _half(blocks, 0)), None


FORMATS = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q8_0": Format(32, 34, _q8_0),
    "Q2_K": Format(256, 84, _q2_k),
    "Q3_K": Format(256, 110, _q3_k),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
    "IQ4_NL": Format(32, 18, _iq4_nl),
    "IQ4_XS": Format(256, 136, _iq4_xs),
}
"""Formats by their names in GGUF."""


def unpack_rows(rows: StoredRows) -> Parts:
    """Unpack rows of a block format on their device: codes int8 [rows, in], scales and minima [rows, groups]."""
    form, count = FORMATS[rows.kind], len(rows.data)
    blocks = rows.data.view(-1, form.bytes)
    values = torch.empty(len(blocks), form.size, dtype=torch.int8, device=blocks.device)
    scales: list[Levels] = []
    minima: list[Levels] = []
    step = _PIECE // form.size
    for at in range(0, len(blocks), step):
        codes, steps, mins = form.apart(blocks[at : at + step])
        values[at : at + step] = codes.flatten(1)
        scales.append(steps)
        minima += [] if mins is None else [mins]
    return values.view(count, -1), Levels.laid(scales, count), Levels.laid(minima, count) if minima else None
