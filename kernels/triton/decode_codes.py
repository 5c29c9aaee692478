# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Triton helpers that decode quantised weights in registers: 4-, 6- and 8-bit codes, e2m1, e4m3, scales and minima."""

import triton
import triton.language as tl

from kvferry.kernels.triton.eight_bits import half

E4M3 = "E4M3"
"""Kind of e4m3 codes that the device converts. FP8 codes are decoded from their bits."""


def _integers(shift: int, offset: str) -> tl.constexpr:
    """Return the instructions that make a bfloat16 of four bits: beside 0x43 they are 128 plus their value."""
    return tl.constexpr(f"""{{
        .reg .b32 low, pair, offset;
        shr.b32 low, $2, {shift};
        and.b32 low, low, 0x0F0F0F0F;
        mov.b32 offset, {offset};
        prmt.b32 pair, low, 0x43434343, 0x4140;
        sub.rn.bf16x2 $0, pair, offset;
        prmt.b32 pair, low, 0x43434343, 0x4342;
        sub.rn.bf16x2 $1, pair, offset;
    }}""")


def _floats(shift: int) -> tl.constexpr:
    """Return the instructions that make bfloat16 of e2m1 (as `float4`); its exponents have an offset of 127."""
    pair = """
        prmt.b32 pair, low, 0, {select};
        shl.b32 sign, pair, 12;
        shl.b32 pair, pair, 6;
        and.b32 sign, sign, 0x80008000;
        and.b32 pair, pair, 0x01C001C0;
        or.b32 pair, pair, sign;
        mul.rn.bf16x2 {out}, pair, size;"""
    pairs = pair.format(select="0x4140", out="$0") + pair.format(select="0x4342", out="$1")
    return tl.constexpr(f"""{{
        .reg .b32 low, pair, sign, size;
        shr.b32 low, $2, {shift};
        and.b32 low, low, 0x0F0F0F0F;
        mov.b32 size, 0x7F007F00;{pairs}
    }}""")


_LOWER, _UPPER = _integers(0, "0x43004300"), _integers(4, "0x43004300")
_LOWER_LESS_8, _UPPER_LESS_8 = _integers(0, "0x43084308"), _integers(4, "0x43084308")
_LOWER_FLOATS, _UPPER_FLOATS = _floats(0), _floats(4)


@triton.jit
def float8(bits):
    """Return float32 of uint8 in e4m3."""
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half(bits).to(tl.float32) * 256.0)


@triton.jit
def float4(bits):
    """Return float16 of uint8 below 16 in e2m1, doubled.

    Exponent and fraction move to where float16 has its own; its exponents have an offset of 15 instead of 1."""
    wide = bits.to(tl.uint16)
    small = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    return small * 32768.0


@triton.jit
def whole(bits, LESS: tl.constexpr):
    """Return float16 of uint8 minus a constant, without a conversion: above 1024 float16's lowest bit is a unit."""
    return (bits.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + LESS)


@triton.jit
def four_bits(bytes, HIGH: tl.constexpr, KIND: tl.constexpr, MINIMA: tl.constexpr):
    """Return bfloat16 of the upper or lower four bits of uint8, four at a time, in the form of `number`.

    It uses NVIDIA's instructions."""
    if KIND == "FP4":
        floats: tl.constexpr = _UPPER_FLOATS if HIGH else _LOWER_FLOATS
        return _by(bytes, floats)
    elif MINIMA:
        integers: tl.constexpr = _UPPER if HIGH else _LOWER
        return _by(bytes, integers)
    else:
        less_8: tl.constexpr = _UPPER_LESS_8 if HIGH else _LOWER_LESS_8
        return _by(bytes, less_8)


@triton.jit
def _by(bytes, ASM: tl.constexpr):
    """Return two pairs of bfloat16 for each four bytes."""
    return tl.inline_asm_elementwise(
        asm=ASM, constraints="=r,=r,r", args=[bytes], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def number(code, shift, x, KIND: tl.constexpr, OFFSETS: tl.constexpr, MINIMA: tl.constexpr):
    """Return codes [OUTS, ..] in the number format of x. shift: float32 [OUTS], added to the codes of each output."""
    if KIND == "E4M3":
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == "FP8":
        value = float8(code)
    elif KIND == "FP4":
        value = float4(code)
    elif KIND == "W8A16":
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif OFFSETS or MINIMA:
        value = whole(code, 0)
    else:
        value = whole(code, 8 if KIND == "W4A16" else 32)
    if OFFSETS:
        value = value.to(tl.float32) + shift[:, None]
    return value.to(x.dtype)


@triton.jit
def word_of(fine, group, used, BYTES: tl.constexpr):
    """Return four consecutive groups' numbers [OUTS] in one word of BYTES."""
    if BYTES == 8:
        return tl.load((fine + group).to(tl.pointer_type(tl.int64)), mask=used, other=0)
    else:
        return tl.load((fine + group).to(tl.pointer_type(tl.int32)), mask=used, other=0)


@triton.jit
def level_in(word, place: tl.constexpr, BYTES: tl.constexpr, SIGNED: tl.constexpr):
    """Return float32 [OUTS] of one group in `word_of`: from float16, or from 8-bit integers."""
    if BYTES == 8:
        return ((word >> 16 * place) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SIGNED:
        return ((word << (24 - 8 * place)) >> 24).to(tl.float32)
    else:
        return ((word >> 8 * place) & 255).to(tl.float32)


@triton.jit
def level(fine, coarse, group, used, SHARED: tl.constexpr):
    """Return float32 of groups [OUTS]; coarse is read if SHARED, the number of groups that share one."""
    found = tl.load(fine + group, mask=used, other=0).to(tl.float32)
    if SHARED:
        found *= tl.load(coarse + group // SHARED, mask=used, other=0.0).to(tl.float32)
    return found
