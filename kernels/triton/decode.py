# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Paged attention of one query token per sequence, its K/V split over several programs and merged afterwards."""

import torch
import triton
import triton.language as tl

from kernels.plan import BatchPlan
from kernels.quantised_cache import PEAKS
from kernels.triton.eight_bits import pool_words
from kernels.triton.launch import Tile
from kernels.triton.parts import Parts, part_of, store_mean
from kernels.triton.softmax import LOG2_E, attend


@triton.jit(do_not_specialize=["stride_table", "splits"])
def decode_kernel(
    q,  # [num_seqs, heads, DIM]
    kv,
    out,  # [num_seqs, heads, DIM], contiguous; written if not SPLIT
    partial,  # `Parts.mean`, written if SPLIT
    partial_log,  # `Parts.log`, likewise
    sinks,  # float32 [heads], read if SINKS
    table,
    total_len,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_head,
    stride_slot,
    stride_table,
    heads,
    splits,
    scale,
    cap,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (sequence, K/V head, part): the heads of the group share each read of K and V. The running softmax of
    the first part begins with the sinks."""
    seq, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(total_len + seq)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin, whole, end = part_of(first, length, part, splits, KEYS)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + rows
    live = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        q + seq.to(tl.int64) * stride_q_token + head[:, None] * stride_q_head + dims[None, :], mask=live, other=0.0
    )
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if SINKS:
        top = tl.where(part == 0, tl.load(sinks + head, mask=rows < GROUP, other=0.0) * LOG2_E, top)
        total = tl.where(part == 0, total + 1.0, total)
    position = tl.zeros([ROWS], dtype=tl.int32) + (length - 1)
    pages = kv + kv_head.to(tl.int64) * stride_head
    blocks = table + seq.to(tl.int64) * stride_table
    acc, top, total = attend(
        query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, begin, whole, position, scale, cap,
        DIM, SLOTS, KEYS, BLOCK_D, 0, CAPPED, False, PRECISION, PEAK,
    )  # fmt: skip
    acc, top, total = attend(
        query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, whole, end, position, scale, cap,
        DIM, SLOTS, KEYS, BLOCK_D, 0, CAPPED, True, PRECISION, PEAK,
    )  # fmt: skip
    store_mean(
        acc, top, total, out, partial, partial_log, seq.to(tl.int64) * heads + head, part, splits, dims, rows < GROUP,
        DIM, SPLIT,
    )  # fmt: skip


def decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    out: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None,
    splits: int,
    tile: Tile,
) -> None:
    """Attention of the plan's decodes into the front of `out` [T, heads, dim], contiguous. `splits` parts per sequence,
    a power of two."""
    heads, dim = q.shape[1:]
    _, _, kv_heads, slots, _ = kv_layer.shape
    words = pool_words(kv_layer)
    parts = Parts(out[: plan.num_decodes], splits)
    decode_kernel[(plan.num_decodes, kv_heads, splits)](
        q, words, out, parts.mean, parts.log, out if sinks is None else sinks, plan.block_table, plan.total_len,
        q.stride(0), q.stride(1), *kv_layer.stride()[:4], plan.block_table.stride(0), heads, splits,
        scale * LOG2_E.value, cap * LOG2_E.value,
        GROUP=heads // kv_heads, DIM=dim, SLOTS=slots, ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=tile.dim,
        WINDOW=window, CAPPED=cap > 0, SINKS=sinks is not None, SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PEAK=PEAKS.get(kv_layer.dtype, 0),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    parts.merge()
