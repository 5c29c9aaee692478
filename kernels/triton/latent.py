# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for latent attention (MLA) in absorbed form, with split KV.

One vector per position is the key of all heads. Its part after the rotated dims is their value."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.triton.device_features import precision_of
from kvferry.kernels.triton.eight_bits import number, peak_of, pool_words, scales_of
from kvferry.kernels.triton.online_softmax import LOG2_E, slots_of, weigh
from kvferry.kernels.triton.split_kv import ITEM, SPAN, Division, store_mean
from kvferry.kernels.triton.tile_sizes import Tile, power_of_two


@triton.jit
def attend_latents(
    turned,  # [ROWS, BLOCK_R], rotated dims of the queries
    plain,  # [ROWS, BLOCK_C], the rest in the latents' space
    acc,  # float32 [ROWS, BLOCK_C], weighted sum of latents so far
    top,
    total,
    kv,
    table,
    stride_block,
    stride_slot,
    begin,
    end,
    scale,  # softmax scale * log2(e)
    ROTATED: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Attend like `online_softmax.attend`, for rows that see all of [begin, end)."""
    first, rest = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    for start in range(begin, end, KEYS):
        width = ROTATED + RANK + 4 if PEAK else stride_slot
        _, inside, offset = slots_of(table, start, end, stride_block, width, SLOTS, KEYS, MASKED)
        vector = kv + offset[:, None]
        key = tl.load(vector + first[None, :], mask=inside[:, None] & (first < ROTATED)[None, :], other=0)
        latent = tl.load(vector + ROTATED + rest[None, :], mask=inside[:, None] & (rest < RANK)[None, :], other=0)
        if PEAK:
            key, latent = number(key, PEAK), number(latent, PEAK)
        key, latent = key.to(plain.dtype), latent.to(plain.dtype)
        score = tl.dot(turned, tl.trans(key), input_precision=PRECISION)
        score = tl.dot(plain, tl.trans(latent), score, input_precision=PRECISION) * scale
        if PEAK:
            own = scales_of(kv + offset, inside, ROTATED + RANK, PEAK)
            score *= own[None, :]
        if MASKED:
            score = tl.where(inside[None, :], score, float("-inf"))
        weight, decay, top, total = weigh(score, top, total)
        if PEAK:
            if plain.dtype == tl.float16:  # float16 does not hold a small weight times a scale
                latent = (latent.to(tl.float32) * own[:, None]).to(plain.dtype)
            else:
                weight *= own[None, :]
        acc = tl.dot(weight.to(plain.dtype), latent, acc * decay[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table"])
def latent_kernel(
    turned,  # [rows, heads, ROTATED], last dimension dense
    plain,  # [rows, heads, RANK], last dimension dense
    kv,
    out,  # [rows, heads, RANK], contiguous; written for rows in one part
    partial,  # of `Division.partial`, for the others
    partial_log,
    items,
    spans,
    table,  # a row's block ids
    stride_turned,
    stride_turned_head,
    stride_plain,
    stride_plain_head,
    stride_block,
    stride_slot,
    stride_table,
    heads,
    scale,
    ROTATED: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (part, tile of heads): attend. The grid covers the largest number of parts."""
    part = tl.program_id(0)
    if part >= tl.load(items):
        return
    item = items + (1 + part) * ITEM
    seq, begin, end = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    whole = begin + (end - begin) // KEYS * KEYS

    head, first, rest = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    there, live = (head < heads)[:, None], (head < heads)[:, None] & (rest < RANK)[None, :]
    source = turned + seq * stride_turned + head[:, None] * stride_turned_head + first[None, :]
    of_key = tl.load(source, mask=there & (first < ROTATED)[None, :], other=0.0)
    source = plain + seq * stride_plain + head[:, None] * stride_plain_head + rest[None, :]
    of_latent = tl.load(source, mask=live, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    blocks = table + seq * stride_table
    acc, top, total = attend_latents(
        of_key, of_latent, acc, top, total, kv, blocks, stride_block, stride_slot, begin, whole, scale,
        ROTATED, RANK, SLOTS, KEYS, BLOCK_R, BLOCK_C, False, PRECISION, PEAK,
    )  # fmt: skip
    acc, top, total = attend_latents(
        of_key, of_latent, acc, top, total, kv, blocks, stride_block, stride_slot, whole, end, scale,
        ROTATED, RANK, SLOTS, KEYS, BLOCK_R, BLOCK_C, True, PRECISION, PEAK,
    )  # fmt: skip
    store_mean(
        acc, top, total, out, partial, partial_log, part, tl.load(spans + seq * SPAN + 1) == 1, seq, heads, head, rest,
        head < heads, RANK,
    )  # fmt: skip


def sum_latents(
    turned: torch.Tensor,
    plain: torch.Tensor,
    kv_layer: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    division: Division,
    tile: Tile,
) -> torch.Tensor:
    """Return the weighted sums of latents per row and head, [rows, heads, rank].

    table: int32 [rows, blocks]. division: of the rows' visible positions by tiles of the tile's keys."""
    heads, rank = plain.shape[1:]
    rotated, slots = turned.shape[2], kv_layer.shape[3]
    out = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    mean, log = division.partial(heads, rank)
    latent_kernel[(division.count, triton.cdiv(heads, tile.rows))](
        turned, plain, pool_words(kv_layer), out, mean, log, division.items, division.spans, table,
        *turned.stride()[:2], *plain.stride()[:2], kv_layer.stride(0), kv_layer.stride(3), table.stride(0),
        heads, scale * LOG2_E.value,
        ROTATED=rotated, RANK=rank, SLOTS=slots, ROWS=tile.rows, KEYS=tile.keys,
        BLOCK_R=power_of_two(rotated, 16), BLOCK_C=tile.dim,
        PRECISION=precision_of(plain), PEAK=peak_of(kv_layer),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    division.merge(mean, log, out)
    return out
