# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels for RMSNorm, with or without residual, and for activations with and without a gate."""

from math import inf

import torch
import triton
import triton.language as tl

from kvferry.kernels.activation import KINDS, Activation
from kvferry.kernels.gate_spec import Gate
from kvferry.kernels.triton.tile_sizes import power_of_two

TILE = 2048
"""Elements that a program handles at once."""


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    stride_x,
    stride_residual,
    eps,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
):
    """Program: norm ROWS rows. With ADD the sum is rounded to its own dtype first, as `total` is read."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    live = (row < rows) & (dims < DIM)
    value = tl.load(x + row * stride_x + dims, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * stride_residual + dims, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * DIM + dims, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
    gain = tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + dims, (value * scale[:, None] * gain).to(out.dtype.element_ty), mask=live)


@triton.jit
def gate_mul_kernel(
    gate_up,
    out,
    stride,
    slope,
    cubic,
    limit,
    offset,
    LIMITED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part of the row): compute the gated activation."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = dims < DIM
    gate = tl.load(gate_up + row * stride + dims, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + DIM + dims, mask=live, other=0.0).to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate * tl.sigmoid(gate * (slope + cubic * gate * gate)) * (up + offset)
    tl.store(out + row * DIM + dims, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def expm1_below_zero(x):
    """Return e^x - 1 of x up to 0; near 0 by a series, where the difference would lose digits."""
    series = 1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x / 5040)))
    return tl.where(x > -0.4, x + x * x * (0.5 + x * series), tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=["count"])
def activate_kernel(x, out, count, positive, negative, beta, bound, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program: compute BLOCK activations. KIND: index in `kernels.activation.KINDS`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    if KIND == 0:
        done = tl.where(value < 0, 0.0, value * value)
    elif KIND == 1:
        done = value * tl.sigmoid(value * (1.5957691216057308 + 0.07135481627 * value * value))
    elif KIND == 2:
        done = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        below = (expm1_below_zero(tl.minimum(value, bound)) - value) * negative
        done = tl.where(value > 0, positive * value * value, below) + beta * value
    tl.store(out + at, done.to(out.dtype.element_ty), mask=at < count)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) of [..., d]; without a residual (rms_norm(x), x)."""
    dim = x.shape[-1]
    flat = x.reshape(-1, dim)
    added = flat if residual is None else residual.reshape(-1, dim)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = flat if residual is None else torch.empty_like(out)
    block = power_of_two(dim)
    rows = max(1, TILE // block)
    rms_norm_kernel[(triton.cdiv(flat.shape[0], rows),)](
        flat, added, weight, out, total, flat.shape[0], flat.stride(0), added.stride(0), eps,
        DIM=dim, ROWS=rows, BLOCK_D=block, ADD=residual is not None, num_warps=8 if block > TILE else 4,
    )  # fmt: skip
    return out.view(x.shape), x if residual is None else total.view(x.shape)


def gate_mul(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """See `Ops.gate_mul`."""
    tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, dim), dtype=gate_up.dtype, device=gate_up.device)
    block = min(TILE, power_of_two(dim))
    gate_mul_kernel[(tokens, triton.cdiv(dim, block))](
        gate_up, out, gate_up.stride(0), gate.slope, gate.cubic, gate.limit, gate.offset,
        LIMITED=gate.limit < inf, DIM=dim, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def activate(x: torch.Tensor, own: Activation) -> torch.Tensor:
    """See `Ops.activate`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    activate_kernel[(triton.cdiv(x.numel(), TILE),)](
        x, out, x.numel(), own.positive, own.negative, own.beta, own.bound,
        KIND=KINDS.index(own.kind), BLOCK=TILE, num_warps=4,
    )  # fmt: skip
    return out
