# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Triton helpers for K and V in 8 bits: conversion and rounding of int8 and e4m3, and their scales.

PEAK is the largest number, 127 for int8 and 448 for e4m3. If BY_HARDWARE is false, e4m3 is decoded from its bits, since
not every GPU converts it."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.quantised_cache import FP8, PEAKS
from kvferry.kernels.triton.device_features import hardware_e4m3

BY_HARDWARE = tl.constexpr(-448)


@triton.jit
def half(bits):
    """Return float16 of uint8 in e4m3, over 256: its bits except for the offset of the exponent. NaN stays NaN."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def number(code, PEAK: tl.constexpr):
    """Return the number that a code stands for, divided by its scale as `scales_of` returns it."""
    if PEAK == BY_HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif PEAK == 448:
        return half(code)
    else:
        return code.to(tl.float32)


@triton.jit
def scales_of(vectors, inside, DIM: tl.constexpr, PEAK: tl.constexpr):
    """Return the float32 scale after each of the vectors, times 256 for e4m3."""
    scale = tl.load((vectors + DIM).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)
    return scale * 256.0 if PEAK == 448 else scale


@triton.jit
def nearest(x, PEAK: tl.constexpr):
    """Return int8, or uint8 in e4m3, of float32 within the peak: rounded to nearest, ties to even."""
    if PEAK == 448:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(tl.abs(x) < 0.015625, small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)


def peak_of(kv_layer: torch.Tensor) -> int:
    """Return PEAK of kernels that read this pool; 0 if it is not in 8 bits."""
    if kv_layer.dtype == FP8 and hardware_e4m3(kv_layer.device):
        return int(BY_HARDWARE.value)
    return PEAKS.get(kv_layer.dtype, 0)


def pool_words(kv_layer: torch.Tensor) -> torch.Tensor:
    """Return the pool as kernels take it: e4m3 as uint8."""
    return kv_layer.view(torch.uint8) if kv_layer.dtype == FP8 else kv_layer
