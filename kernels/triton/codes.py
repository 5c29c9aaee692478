# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""What codes, and the scales and minima of their groups, become in registers."""

import triton
import triton.language as tl

from kernels.triton.eight_bits import half


@triton.jit
def float8(bits):
    """float32 of uint8 in e4m3."""
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half(bits).to(tl.float32) * 256.0)


@triton.jit
def float4(bits):
    """float32 of uint8 below 16 in e2m1, doubled."""
    low = bits & 7
    size = tl.where(low == 0, 0, (2 | low & 1) << (low >> 1) >> 1).to(tl.float32)
    return tl.where(bits < 8, size, -size)


@triton.jit
def number(code, shift, x, KIND: tl.constexpr, OFFSETS: tl.constexpr, MINIMA: tl.constexpr):
    """Codes [OUTS, ..] in the number format of x. shift: float32 [OUTS], what is added to the codes of each output."""
    if KIND == "FP8":
        value = float8(code)
    elif KIND == "FP4":
        value = float4(code)
    elif KIND == "W8A16":
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = code.to(tl.float32)
    if OFFSETS:
        value += shift[:, None]
    elif KIND == "W4A16" and not MINIMA:
        value -= 8.0
    elif KIND == "W6A16" and not MINIMA:
        value -= 32.0
    return value.to(x.dtype)


@triton.jit
def level(fine, coarse, group, used, SHARED: tl.constexpr):
    """float32 of groups [OUTS]; coarse is read if SHARED, by so many groups each."""
    found = tl.load(fine + group, mask=used, other=0).to(tl.float32)
    if SHARED:
        found *= tl.load(coarse + group // SHARED, mask=used, other=0.0).to(tl.float32)
    return found
