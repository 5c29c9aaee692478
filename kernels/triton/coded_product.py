# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Triton kernel for products of few rows with quantised weights, dequantised in registers.

Codes are multiplied as they are, since all are exact in 16 bits, and a group's sum is multiplied by its scale. The
result is the product with the weights in float32 up to the order of its sums. That order is one tile after the other
along the inputs, the same for every batch of up to `ORDERED` rows, so a row has the same bits in each of them.
`dequantised_product` serves more rows."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.bit_packing import FP8, SPANS, STORED
from kvferry.kernels.gpu_weight_layout import CodedForm
from kvferry.kernels.graph_inputs import CAPTURED_ROWS
from kvferry.kernels.triton.decode_codes import E4M3, four_bits, level, level_in, number, word_of
from kvferry.kernels.triton.dequantised_product import product_of_unpacked
from kvferry.kernels.triton.device_features import hardware_bfloat16, hardware_e4m3, on_amd, precision_of
from kvferry.kernels.triton.tile_sizes import power_of_two, product_splits, product_tile

ORDERED = CAPTURED_ROWS[-1]
"""Rows of the largest batch that is summed in the same order as all smaller ones."""
_SUMS = 32
"""Sums of inputs that a program makes."""
_UNROLLED_INPUTS = 128
"""Maximum number of inputs of a loop step that consists of several short tiles."""
_BAND = 8
"""Tiles of rows that go through the outputs side by side, so that the weights they read stay in the cache."""


@triton.jit(do_not_specialize=["rows", "share"])
def product_kernel(
    x,
    codes,  # uint8 [outputs, bytes]
    scales,  # [outputs, groups]
    coarse_scales,  # [outputs, groups / SHARED]
    offsets,  # int16 [outputs, groups], read if OFFSETS
    minima,  # [outputs, groups], read if MINIMA
    coarse_minima,
    sums,  # float32 [rows, sums], of UNIT inputs each, read if MINIMA
    bias,  # [outputs], read if BIASED
    out,
    rows,
    outputs,
    columns,
    groups,
    share,  # tiles of inputs that a program takes
    stride_x,
    stride_out,
    stride_part,
    KIND: tl.constexpr,
    SPANS: tl.constexpr,  # of the inputs of a tile
    STORED: tl.constexpr,  # bytes of a tile
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale
    WHOLE: tl.constexpr,  # one scale an output
    EVEN: tl.constexpr,  # inputs are whole tiles
    UNIT: tl.constexpr,  # inputs of a tile that share a scale
    SHARED: tl.constexpr,  # groups of a coarse scale, and of a coarse minimum, or 0
    OFFSETS: tl.constexpr,
    MINIMA: tl.constexpr,
    BIASED: tl.constexpr,
    FOUR_BITS: tl.constexpr,  # by NVIDIA's instructions: see `four_bits`
    UNROLL: tl.constexpr,  # tiles of a step of the loop
    WORD: tl.constexpr,  # bytes of the scales of four groups if these are a step, or 0: see `word_of`
    SIGNED: tl.constexpr,  # of integers
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of rows and of outputs, part of the inputs). out: [parts, rows, outputs]."""
    tiles, wide = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTS)
    at, part = tl.program_id(0), tl.program_id(1)
    first = at // (BAND * wide) * BAND
    height = tl.minimum(tiles - first, BAND)
    within = at % (BAND * wide)
    row = (first + within % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = (within // height).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    there, used = row < rows, output < outputs

    SPAN: tl.constexpr = TILE // SPANS
    span = tl.arange(0, SPAN)
    source = x + row[:, None] * stride_x + span[None, :]
    stored = codes + output[:, None] * (columns // SPANS * STORED) + span[None, :]
    acc = tl.zeros([ROWS, OUTS], dtype=tl.float32)
    shift = tl.zeros([OUTS], dtype=tl.float32)
    if WHOLE:
        scale = tl.load(scales + output, mask=used, other=0.0).to(tl.float32)
        if OFFSETS:
            shift = tl.load(offsets + output, mask=used, other=0).to(tl.float32)
    begin = part * share
    for step in range(begin, tl.minimum(begin + share, tl.cdiv(columns, TILE * UNROLL))):
        if WORD:
            # Numbers of the four groups of a step, and their coarse ones.
            four = output * groups + step * 4
            sizes = word_of(scales, four, used, WORD)
            coarse = 1.0
            if SHARED:
                coarse = tl.load(coarse_scales + four // SHARED, mask=used, other=0.0).to(tl.float32)
            if MINIMA:
                min_words = word_of(minima, four, used, WORD)
                coarse_min = 1.0
                if SHARED:
                    coarse_min = tl.load(coarse_minima + four // SHARED, mask=used, other=0.0).to(tl.float32)
        for sub in tl.static_range(UNROLL):
            tile = step * UNROLL + sub
            kept = used[:, None] & (span >= 0)[None, :]
            if not EVEN:
                kept = kept & (tile * TILE + span < columns)[None, :]
            if STORED == 3:
                upper = tl.load(stored + (tile * STORED + 2) * SPAN, mask=kept, other=0)
            added = acc
            for place in tl.static_range(SPANS):
                start = tile * TILE + place * SPAN
                group = output * groups + start // GROUP
                if place * SPAN % UNIT == 0 and not WHOLE:
                    added = tl.zeros([ROWS, OUTS], dtype=tl.float32)
                    if OFFSETS:
                        shift = tl.load(offsets + group, mask=used, other=0).to(tl.float32)
                seen = there[:, None] & (span >= 0)[None, :]
                if not EVEN:
                    seen = seen & (start + span < columns)[None, :]
                part_x = tl.load(source + start, mask=seen, other=0.0)
                if place % 2 == 0:
                    code = tl.load(stored + (tile * STORED + place // 2) * SPAN, mask=kept, other=0)
                if FOUR_BITS:
                    value = four_bits(code, place % 2 == 1, KIND, MINIMA)
                else:
                    bits = code if SPANS == 1 else code >> 4 * (place % 2) & 15
                    if STORED == 3:
                        bits |= (upper >> 2 * place & 3) << 4
                    value = number(bits, shift, part_x, KIND, OFFSETS, MINIMA)
                added = tl.dot(part_x, tl.trans(value), added, input_precision=PRECISION)
                if (place + 1) * SPAN % UNIT == 0:
                    if WHOLE:
                        acc = added
                    elif WORD:
                        acc += (
                            added
                            * (level_in(sizes, (sub * TILE + place * SPAN) // GROUP, WORD, SIGNED) * coarse)[None, :]
                        )
                    else:
                        acc += added * level(scales, coarse_scales, group, used, SHARED)[None, :]
                    if MINIMA:
                        total = tl.load(sums + row * (columns // UNIT) + start // UNIT, mask=there, other=0.0)
                        if WORD:
                            low = level_in(min_words, (sub * TILE + place * SPAN) // GROUP, WORD, SIGNED) * coarse_min
                        else:
                            low = level(minima, coarse_minima, group, used, SHARED)
                        acc += total[:, None] * low[None, :]
    if WHOLE:
        acc *= scale[None, :]
    if BIASED:
        acc += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + part.to(tl.int64) * stride_part + row[:, None] * stride_out + output[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None] & used[None, :])


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(parts, bias, out, rows, outputs, splits, stride_out, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of outputs): add the parts [splits, rows, outputs] in order, and the bias."""
    row, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = output < outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(splits):
        total += tl.load(parts + (part * rows + row) * outputs + output, mask=used, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + output, total.to(out.dtype.element_ty), mask=used)


@triton.jit
def inputs_kernel(x, sums, units, stride_x, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of sums): sum UNIT neighbouring inputs each. sums: float32 [rows, units]."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, there = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :], unit < units
    value = tl.load(x + row * stride_x + at, mask=there[:, None], other=0.0).to(tl.float32)
    tl.store(sums + row * units + unit, tl.sum(value, 1), mask=there)


def reads_four_bits(x: torch.Tensor, form: CodedForm) -> bool:
    """Return whether the device has instructions that turn these four-bit codes into bfloat16."""
    packed, plain = SPANS[form.kind] == 2, form.offsets is None
    return packed and plain and x.dtype is torch.bfloat16 and hardware_bfloat16(x.device)


def unrolled(form: CodedForm, columns: int) -> tuple[int, int]:
    """Return the tiles per loop step, and WORD.

    Short tiles are joined, so that a step reads more before it waits: four groups if one load reads their scales."""
    four, scales = 4 * form.group, form.scales
    sizes = {levels.fine.element_size() for levels in (scales, form.minima) if levels is not None}
    alike = len(sizes) == 1 and max(sizes) <= 2 and scales.groups % 4 == 0 and scales.shared % 4 == 0
    if alike and four <= _UNROLLED_INPUTS and four % form.tile == 0 and columns % four == 0:
        return four // form.tile, 4 * max(sizes)
    unroll = max(1, _UNROLLED_INPUTS // form.tile)
    return (unroll if columns % (form.tile * unroll) == 0 else 1), 0


def product(x: torch.Tensor, form: CodedForm, bias: torch.Tensor | None, out: torch.Tensor, processors: int) -> None:
    """Write x [n, in] @ weight.T + bias into out [n, out], both dense along their last dimension.

    processors: the device's number of multiprocessors."""
    x = x if form.order is None else x.index_select(1, form.order)
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, columns), outputs = x.shape, len(form.codes)
    if not rows:
        return
    kind = E4M3 if form.kind == FP8 and hardware_e4m3(x.device) else form.kind
    if rows > ORDERED:
        product_of_unpacked(x, form, kind, bias, out)
        return
    tile = product_tile(rows, form.tile, x.element_size(), on_amd(x.device))
    unroll, word = unrolled(form, columns)
    steps, wide = triton.cdiv(columns, form.tile * unroll), triton.cdiv(outputs, tile.keys)
    splits = product_splits(wide, steps, processors)
    parts = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if splits > 1 else out
    added = out if bias is None else bias
    unit, scales, offsets, sums = form.unit, form.scales, form.offsets, out
    minima = form.minima or scales
    if form.minima:
        units = columns // unit
        sums = torch.empty(rows, units, dtype=torch.float32, device=x.device)
        inputs_kernel[(rows, triton.cdiv(units, _SUMS))](
            x, sums, units, x.stride(0), UNIT=unit, BLOCK=_SUMS, num_warps=4
        )
    product_kernel[(triton.cdiv(rows, tile.rows) * wide, splits)](
        x, form.codes, scales.fine, scales.fine if scales.coarse is None else scales.coarse,
        form.codes if offsets is None else offsets,
        minima.fine, minima.fine if minima.coarse is None else minima.coarse, sums, added, parts,
        rows, outputs, columns, scales.groups, triton.cdiv(steps, splits),
        x.stride(0), parts.stride(-2), parts.stride(0) if splits > 1 else 0,
        KIND=kind, SPANS=SPANS[form.kind], STORED=STORED[form.kind],
        ROWS=tile.rows, OUTS=tile.keys, TILE=form.tile, GROUP=form.group,
        WHOLE=scales.groups == 1 and not form.minima, EVEN=columns % form.tile == 0, UNIT=unit, SHARED=scales.shared,
        OFFSETS=offsets is not None, MINIMA=form.minima is not None, BIASED=bias is not None and splits == 1,
        FOUR_BITS=reads_four_bits(x, form), UNROLL=unroll, WORD=word,
        SIGNED=scales.fine.dtype == torch.int8, BAND=_BAND,
        PRECISION=precision_of(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        block = min(1024, power_of_two(outputs))
        sum_kernel[(rows, triton.cdiv(outputs, block))](
            parts, added, out, rows, outputs, splits, out.stride(0),
            BIASED=bias is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
