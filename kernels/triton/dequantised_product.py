# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Products of many rows with quantised weights: dequantises them into 16-bit scratch memory, then calls cuBLAS.

The scratch weights are rounded to the format of the activations."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.bit_packing import SPANS, STORED
from kvferry.kernels.gpu_weight_layout import CodedForm
from kvferry.kernels.triton.decode_codes import level, number

SCRATCH_BYTES = 256 << 20
"""Bytes of weights that are unpacked at once."""
_OUTPUTS = 32
"""Outputs that a program unpacks."""


@triton.jit
def unpack_kernel(
    codes,  # uint8 [outputs, bytes]
    scales,  # [outputs, groups]
    coarse_scales,  # [outputs, groups / SHARED]
    offsets,  # int16 [outputs, groups], read if OFFSETS
    minima,  # [outputs, groups], read if MINIMA
    coarse_minima,
    weight,  # [outputs, columns]
    outputs,
    columns,
    groups,
    KIND: tl.constexpr,
    SPANS: tl.constexpr,  # of the inputs of a tile
    STORED: tl.constexpr,  # bytes of a tile
    OUTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale
    SHARED: tl.constexpr,  # groups of a coarse scale, and of a coarse minimum, or 0
    OFFSETS: tl.constexpr,
    MINIMA: tl.constexpr,
):
    """Program (block of outputs, tile of inputs): unpack; each span lies within a group."""
    output = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    tile = tl.program_id(1)
    used = output < outputs
    SPAN: tl.constexpr = TILE // SPANS
    span = tl.arange(0, SPAN)
    stored = codes + output[:, None] * (columns // SPANS * STORED) + span[None, :]
    kept = used[:, None] & (tile * TILE + span < columns)[None, :]
    if STORED == 3:
        upper = tl.load(stored + (tile * STORED + 2) * SPAN, mask=kept, other=0)
    for place in tl.static_range(SPANS):
        start = tile * TILE + place * SPAN
        group = output * groups + start // GROUP
        if place % 2 == 0:
            code = tl.load(stored + (tile * STORED + place // 2) * SPAN, mask=kept, other=0)
        bits = code if SPANS == 1 else code >> 4 * (place % 2) & 15
        if STORED == 3:
            bits |= (upper >> 2 * place & 3) << 4
        size = level(scales, coarse_scales, group, used, SHARED)
        shift = size
        if OFFSETS:
            shift = tl.load(offsets + group, mask=used, other=0).to(tl.float32)
        value = number(bits, shift, size, KIND, OFFSETS, MINIMA) * size[:, None]
        if MINIMA:
            value += level(minima, coarse_minima, group, used, SHARED)[:, None]
        where = weight + output[:, None] * columns + (start + span)[None, :]
        tl.store(where, value.to(weight.dtype.element_ty), mask=used[:, None] & (start + span < columns)[None, :])


def unpacked_rows(form: CodedForm, kind: str, first: int, end: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights [end - first, columns] of the outputs [first, end), inputs in the form's order.

    kind: how kernels read the form's codes."""
    count, scales, minima = end - first, form.scales, form.minima or form.scales
    weight = torch.empty(count, columns, dtype=dtype, device=form.codes.device)

    def part(levels: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        return (other if levels is None else levels)[first:end]

    unpack_kernel[(triton.cdiv(count, _OUTPUTS), triton.cdiv(columns, form.tile))](
        form.codes[first:end], scales.fine[first:end], part(scales.coarse, scales.fine),
        part(form.offsets, form.codes), minima.fine[first:end], part(minima.coarse, minima.fine), weight,
        count, columns, scales.groups,
        KIND=kind, SPANS=SPANS[form.kind], STORED=STORED[form.kind], OUTS=_OUTPUTS, TILE=form.tile, GROUP=form.group,
        SHARED=scales.shared, OFFSETS=form.offsets is not None, MINIMA=form.minima is not None, num_warps=4,
    )  # fmt: skip
    return weight


def product_of_unpacked(
    x: torch.Tensor, form: CodedForm, kind: str, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write x [n, in] @ weight.T + bias into out [n, out], as many outputs at once as fit SCRATCH_BYTES."""
    columns, outputs = x.shape[1], len(form.codes)
    at_once = max(1, SCRATCH_BYTES // (columns * x.element_size()))
    for first in range(0, outputs, at_once):
        end = min(outputs, first + at_once)
        weight = unpacked_rows(form, kind, first, end, columns, x.dtype).t()
        part = out[:, first:end]
        if part.dtype == x.dtype:
            torch.mm(x, weight, out=part)
        elif x.is_cuda:
            part.copy_(torch.mm(x, weight, out_dtype=part.dtype))
        else:
            part.copy_(torch.mm(x.to(part.dtype), weight.to(part.dtype)))
        if bias is not None:
            part += bias[first:end]
