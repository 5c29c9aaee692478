"""Dequantisation of GGUF tensors at load (block formats: ggml's `ggml-common.h`).

Works on small pieces, straight into the target: scratch tensors stay in the core's cache and below the size at which
malloc maps fresh pages for each, which makes it ten times faster than whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.models.mxfp4 import RUN, codes_of_blocks
from protocol.errors import ConfigError

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 = 10, 11, 12, 13, 14, 20, 23, 39
BLOCKS = {
    Q4_0: "Q4_0",
    Q4_1: "Q4_1",
    Q5_0: "Q5_0",
    Q5_1: "Q5_1",
    Q8_0: "Q8_0",
    Q2_K: "Q2_K",
    Q3_K: "Q3_K",
    Q4_K: "Q4_K",
    Q5_K: "Q5_K",
    Q6_K: "Q6_K",
    IQ4_NL: "IQ4_NL",
    IQ4_XS: "IQ4_XS",
}
CODED = {MXFP4: "MXFP4"}
"""Read as codes and scales instead."""
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
_PIECE = 16 * 1024
"""Elements dequantised at once: 64 KiB of float32."""


def stored_bytes(kind: int, elements: int) -> int:
    """Bytes that `elements` values of a ggml type take. Raises ConfigError naming an unsupported type."""
    if kind in PLAIN:
        return elements * PLAIN[kind].itemsize
    size, block_bytes, _ = _format(kind)
    return elements // size * block_bytes


def dequantise(raw: torch.Tensor, kind: int, out: torch.Tensor) -> None:
    """Write the values of the stored bytes (uint8, one dimension) into `out`, contiguous, of any float dtype, on any
    device. Raises ConfigError naming an unsupported type."""
    if kind in PLAIN:
        out.copy_(raw.view(PLAIN[kind]).view(out.shape))
        return
    size, block_bytes, decode = _format(kind)
    blocks = raw.view(-1, block_bytes)
    target = out.view(-1, size) if out.is_cpu else torch.empty(len(blocks), size, dtype=out.dtype)
    step = _PIECE // size
    for at in range(0, len(blocks), step):
        decode(blocks[at : at + step], target[at : at + step])
    if not out.is_cpu:
        out.copy_(target.view(out.shape))


def _format(kind: int) -> tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]:
    """(values per block, bytes per block, decoder)."""
    found = _FORMATS.get(kind)
    if found is None:
        from gguf import GGMLQuantizationType

        known = {int(item): item.name for item in GGMLQuantizationType}
        raise ConfigError(
            f"GGUF tensor type {known.get(kind, kind)} is not supported; F32, F16, BF16, {', '.join(BLOCKS.values())} "
            f"and {', '.join(CODED.values())} are",
            param="model",
        )
    return found


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., k] bytes to float32 [..., 2, k]: low halves, then high halves."""
    out = torch.empty(*packed.shape[:-1], 2, packed.shape[-1])
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4
    return out


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 2:]).flatten(1).sub_(8).mul_(_half(blocks, 0)))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 4:]).flatten(1).mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _fives(fifths: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Fifth bits [n, 4] and bytes of halves [n, 16] to float32 [n, 32]."""
    bits = (fifths[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(halves).flatten(1).add_(bits.flatten(1), alpha=16)


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_fives(blocks[:, 2:6], blocks[:, 6:]).sub_(16).mul_(_half(blocks, 0)))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_fives(blocks[:, 4:8], blocks[:, 8:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8) * _half(blocks, 0))


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes to eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each: the low six bits of bytes 0-3 and 4-7
    are the first four of each; nibbles of bytes 8-11 with the top two bits of 0-3 and 4-7 are the others."""
    scales, mins, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    high_scales = (rest & 15) | ((scales >> 2) & 0x30)
    high_mins = (rest >> 4) | ((mins >> 2) & 0x30)
    return torch.cat((scales & 63, high_scales), 1).float(), torch.cat((mins & 63, high_mins), 1).float()


def _k_scaled(blocks: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """values [n, 8, 32] times the block's scales minus its minima (Q4_K and Q5_K)."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales, mins = scales * _half(blocks, 0), mins * _half(blocks, 2)
    out.copy_(values.mul_(scales[..., None]).sub_(mins[..., None]).flatten(1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _k_scaled(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2), out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    values = _nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    _k_scaled(blocks, values.add_(fifth, alpha=16), out)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    values = low.add_(high, alpha=16).sub_(32).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    out.copy_(values.mul_(scales[..., None]).flatten(1))


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """64 bytes of pairs of bits to float32 [n, 16, 16]: byte l of each 32 has those of inputs l, 32 + l, ..."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 16, 16).float()


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, mins = (blocks[:, :16] & 15) * _half(blocks, 80), (blocks[:, :16] >> 4) * _half(blocks, 82)
    values = _pairs(blocks[:, 16:80].contiguous())
    out.copy_(values.mul_(scales[..., None]).sub_(mins[..., None]).flatten(1))


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = _nibbles(blocks[:, 96:104]).flatten(1)
    high = (blocks[:, None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    scales = low.add_(high.flatten(1), alpha=16).sub_(32).mul_(_half(blocks, 108))
    thirds = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = _pairs(blocks[:, 32:96].contiguous()).add_(thirds.view(-1, 16, 16), alpha=4).sub_(4)
    out.copy_(values.mul_(scales[..., None]).flatten(1))


_IQ4 = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.float32)
"""What the sixteen codes of IQ4 stand for."""


def _iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_IQ4[_nibbles(blocks[:, 2:]).flatten(1).long()].mul_(_half(blocks, 0)))


def _iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1)
    scales = _nibbles(blocks[:, 4:8, None]).flatten(1).add_(high, alpha=16).sub_(32).mul_(_half(blocks, 0))
    values = _IQ4[_nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(2).long()]
    out.copy_(values.mul_(scales[..., None]).flatten(1))


def _mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes_of_blocks(blocks[:, None]).write(out)


_FORMATS: dict[int, tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    Q4_0: (32, 18, _q4_0),
    Q4_1: (32, 20, _q4_1),
    Q5_0: (32, 22, _q5_0),
    Q5_1: (32, 24, _q5_1),
    Q8_0: (32, 34, _q8_0),
    Q2_K: (256, 84, _q2_k),
    Q3_K: (256, 110, _q3_k),
    Q4_K: (256, 144, _q4_k),
    Q5_K: (256, 176, _q5_k),
    Q6_K: (256, 210, _q6_k),
    IQ4_NL: (32, 18, _iq4_nl),
    IQ4_XS: (256, 136, _iq4_xs),
    MXFP4: (RUN, 17, _mxfp4),
}
