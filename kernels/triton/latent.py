# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Attention to cached latents themselves, the absorbed form of `kernels.latent`: one vector of each position is the key
of all heads and, behind what rotates, their value. Split and merged as in decode."""

import torch
import triton
import triton.language as tl

from kernels.quantised_cache import PEAKS
from kernels.triton.eight_bits import number, pool_words, scales_of
from kernels.triton.launch import Tile, power_of_two
from kernels.triton.parts import Parts, part_of, store_mean
from kernels.triton.softmax import LOG2_E, slots_of, weigh


@triton.jit
def attend_latents(
    turned,  # [ROWS, BLOCK_R], what rotates of the queries
    plain,  # [ROWS, BLOCK_C], the rest in the latents' space
    acc,  # float32 [ROWS, BLOCK_C], the weighted sum of latents so far
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
    """As `softmax.attend`, of rows that see all of [begin, end)."""
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
            if plain.dtype == tl.float16:  # which does not hold a small weight times a scale
                latent = (latent.to(tl.float32) * own[:, None]).to(plain.dtype)
            else:
                weight *= own[None, :]
        acc = tl.dot(weight.to(plain.dtype), latent, acc * decay[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table", "splits"])
def latent_kernel(
    turned,  # [rows, heads, ROTATED], last dimension dense
    plain,  # [rows, heads, RANK], last dimension dense
    kv,
    out,  # [rows, heads, RANK], contiguous; written if not SPLIT
    partial,  # `Parts.mean`, written if SPLIT
    partial_log,  # `Parts.log`, likewise
    table,  # a row's block ids
    total_len,  # positions that it sees
    stride_turned,
    stride_turned_head,
    stride_plain,
    stride_plain_head,
    stride_block,
    stride_slot,
    stride_table,
    heads,
    splits,
    scale,
    ROTATED: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (row, tile of heads, part)."""
    seq, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    begin, whole, end = part_of(0, tl.load(total_len + seq), part, splits, KEYS)

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
        acc, top, total, out, partial, partial_log, seq * heads + head, part, splits, rest, head < heads, RANK, SPLIT
    )


def sum_latents(
    turned: torch.Tensor,
    plain: torch.Tensor,
    kv_layer: torch.Tensor,
    table: torch.Tensor,
    total_len: torch.Tensor,
    scale: float,
    splits: int,
    tile: Tile,
) -> torch.Tensor:
    """What heads of rows attend to, [rows, heads, rank], of their queries' two parts. table: int32 [rows, blocks];
    total_len: int32 [rows], of the positions that a row sees; splits: parts of each row, a power of two."""
    count, heads, rank = plain.shape
    rotated, slots = turned.shape[2], kv_layer.shape[3]
    out = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    parts = Parts(out, splits)
    latent_kernel[(count, triton.cdiv(heads, tile.rows), splits)](
        turned, plain, pool_words(kv_layer), out, parts.mean, parts.log, table, total_len,
        *turned.stride()[:2], *plain.stride()[:2], kv_layer.stride(0), kv_layer.stride(3), table.stride(0),
        heads, splits, scale * LOG2_E.value,
        ROTATED=rotated, RANK=rank, SLOTS=slots, ROWS=tile.rows, KEYS=tile.keys,
        BLOCK_R=power_of_two(rotated, 16), BLOCK_C=tile.dim, SPLIT=splits > 1,
        PRECISION="ieee" if plain.dtype == torch.float32 else "tf32", PEAK=PEAKS.get(kv_layer.dtype, 0),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    parts.merge()
    return out
