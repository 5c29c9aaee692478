# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel that applies rotary embedding to q and k, and writes K and V into the pool, in its 8 or 16 bits."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.quantised_cache import PEAKS
from kvferry.kernels.triton.eight_bits import nearest, pool_words
from kvferry.kernels.triton.tile_sizes import power_of_two


@triton.jit
def turned(
    source,
    cos,  # the table's row of this token
    sin,
    head,
    stride,  # between heads
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    BLOCK_HALF: tl.constexpr,
):
    """Return float32 heads of one token, the two halves of their rotated dims, and which of them exist."""
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    live = (head < HEADS) & (dims < HALF)
    c = tl.load(cos + dims, mask=dims < HALF, other=0.0)
    s = tl.load(sin + dims, mask=dims < HALF, other=0.0)
    low = tl.load(source + head * stride + dims, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + head * stride + dims + HALF, mask=live, other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s, live


@triton.jit
def written(x, scale, target, PEAK: tl.constexpr):
    """Return x, float32, in the target's format: in 8 bits rounded to nearest by the scale of each row."""
    if PEAK:
        return nearest(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]), PEAK)
    else:
        return x.to(target.dtype.element_ty)


@triton.jit
def store(
    source,
    target,
    cos,  # the table's row of this token
    sin,
    stride_source,  # between heads
    stride_target,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2, 0: copy
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Copy one token's heads from source to target, rotated in float32; dims from 2 * HALF on are copied.

    PEAK: quantise like `kernels.quantised_cache.quantise`, after rounding to the source's format. A number that is not
    finite makes its vector's scale NaN."""
    head, every = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HEADS)
    dims, rest = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    place = target + head * stride_target
    kind = source.dtype.element_ty
    if HALF > 0:
        low, high, live = turned(source, cos, sin, head, stride_source, HEADS, HALF, BLOCK_HALF)
    if DIM > 2 * HALF:
        kept = (head < HEADS) & (rest < DIM)
        value = tl.load(source + head * stride_source + rest, mask=kept, other=0.0).to(tl.float32)
    scale = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    if PEAK:
        none = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
        if HALF > 0:
            low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
            none += tl.sum((low - low) + (high - high), 1)
        if DIM > 2 * HALF:
            scale = tl.maximum(scale, tl.max(tl.abs(value), 1))
            none += tl.sum(value - value, 1)
        scale = tl.div_rn(scale, tl.zeros_like(scale) + PEAK)
        scale = tl.maximum(scale, 1.1754943508222875e-38) + none
        behind = (target + every * stride_target + DIM).to(tl.pointer_type(tl.float32))
        tl.store(behind, scale, mask=every < HEADS)
    if HALF > 0:
        tl.store(place + dims, written(low, scale, target, PEAK), mask=live)
        tl.store(place + dims + HALF, written(high, scale, target, PEAK), mask=live)
    if DIM > 2 * HALF:
        tl.store(place + rest, written(value, scale, target, PEAK), mask=kept)


@triton.jit
def rope_cache_kernel(
    q,
    k,
    v,
    q_out,  # [T, HEADS, DIM], contiguous
    cos,  # float32 [max_len, HALF], contiguous
    sin,
    kv,
    positions,
    slot_ids,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_kv,
    stride_head,
    stride_slot,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # of K, and of V if PLANES is two
    HALF: tl.constexpr,
    SLOTS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_REST_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (token, 0: K and V, 1: Q); the second exists only with a rotation. Negative slots are not written."""
    token = tl.program_id(0).to(tl.int64)
    turn = tl.load(positions + token) * HALF
    if tl.program_id(1) == 0:
        slot = tl.load(slot_ids + token)
        if slot >= 0:
            place = kv + (slot // SLOTS) * stride_block + (slot % SLOTS) * stride_slot
            store(
                k + token * stride_k_token, place, cos + turn, sin + turn, stride_k_head, stride_head,
                KV_HEADS, WIDTH, HALF, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST_K, PEAK,
            )  # fmt: skip
            if PLANES == 2:
                store(
                    v + token * stride_v_token, place + stride_kv, cos, sin, stride_v_head, stride_head,
                    KV_HEADS, WIDTH, 0, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_W, PEAK,
                )  # fmt: skip
    else:
        store(
            q + token * stride_q_token, q_out + token * HEADS * DIM, cos + turn, sin + turn, stride_q_head, DIM,
            HEADS, DIM, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, 0,
        )  # fmt: skip


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv_layer: torch.Tensor,
    plan: BatchPlan,
) -> torch.Tensor:
    """Implement `Ops.rope_and_cache`.

    q, k and v may be slices of one projection: only their last dimension must be dense."""
    tokens, heads, dim = q.shape
    planes, kv_heads, slots = kv_layer.shape[1:4]
    turned, slot_ids = cos is not None and sin is not None, plan.slots
    if k is None:
        k, slot_ids = q, torch.full_like(slot_ids, -1)
    width, v = k.shape[2], k if v is None else v
    if cos is None or sin is None:
        cos = sin = torch.empty(0, dtype=torch.float32, device=q.device)
    half = cos.shape[-1] if turned else 0
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if turned else q
    rope_cache_kernel[(tokens, 2 if turned else 1)](
        q, k, v, q_out, cos, sin, pool_words(kv_layer), plan.positions, slot_ids,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *kv_layer.stride()[:4],
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, HALF=half, SLOTS=slots, PLANES=planes,
        BLOCK_HEADS=power_of_two(heads), BLOCK_KV_HEADS=power_of_two(kv_heads), BLOCK_HALF=power_of_two(half),
        BLOCK_REST=power_of_two(dim - 2 * half), BLOCK_REST_K=power_of_two(width - 2 * half),
        BLOCK_W=power_of_two(width), PEAK=PEAKS.get(kv_layer.dtype, 0), num_warps=4,
    )  # fmt: skip
    return q_out
