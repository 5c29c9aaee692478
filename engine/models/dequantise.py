"""Dequantisation of GGUF tensors (Q4_0, Q4_K, IQ4_NL, MXFP4, …) to floats, while a model is loaded.

It works on small pieces, straight into the target: scratch tensors stay in the core's cache and below the size at which
malloc maps fresh pages, which is ten times faster than whole tensors."""

from __future__ import annotations

import torch

from kvferry.engine.models.mxfp4 import RUN, codes_of_blocks
from kvferry.kernels.gguf_blocks import FORMATS, Format, Parts
from kvferry.kernels.quantised_codes import Levels
from kvferry.protocol.errors import ConfigError

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
    """Return bytes that `elements` values of a ggml type take. Raises ConfigError naming an unsupported type."""
    if kind in PLAIN:
        return elements * PLAIN[kind].itemsize
    form = _format(kind)
    return elements // form.size * form.bytes


def dequantise(raw: torch.Tensor, kind: int, out: torch.Tensor) -> None:
    """Write the values of stored bytes (uint8, one dimension) into `out`, contiguous, of any float dtype and device.

    Raises ConfigError naming an unsupported type."""
    if kind in PLAIN:
        out.copy_(raw.view(PLAIN[kind]).view(out.shape))
        return
    form = _format(kind)
    blocks = raw.view(-1, form.bytes)
    target = out.view(-1, form.size) if out.is_cpu else torch.empty(len(blocks), form.size, dtype=out.dtype)
    step = _PIECE // form.size
    for at in range(0, len(blocks), step):
        target[at : at + step] = form.values(blocks[at : at + step])
    if not out.is_cpu:
        out.copy_(target.view(out.shape))


def _format(kind: int) -> Format:
    if kind in CODED:
        return _MXFP4
    if kind not in BLOCKS:
        from gguf import GGMLQuantizationType

        known = {int(item): item.name for item in GGMLQuantizationType}
        raise ConfigError(
            f"GGUF tensor type {known.get(kind, kind)} is not supported; F32, F16, BF16, {', '.join(BLOCKS.values())} "
            f"and {', '.join(CODED.values())} are",
            param="model",
        )
    return FORMATS[BLOCKS[kind]]


def _mxfp4(blocks: torch.Tensor) -> Parts:
    codes = codes_of_blocks(blocks[:, None])
    return codes.values.float()[:, None], Levels(codes.scales), None


_MXFP4 = Format(RUN, 17, _mxfp4)
