# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for paged decode attention, each sequence split among several programs (split KV, flash-decoding)."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.triton.device_features import precision_of
from kvferry.kernels.triton.eight_bits import peak_of, pool_words
from kvferry.kernels.triton.online_softmax import LOG2_E, attend
from kvferry.kernels.triton.split_kv import ITEM, SPAN, Division, store_mean
from kvferry.kernels.triton.tile_sizes import Tile


@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    q,  # [num_seqs, heads, DIM]
    kv,
    out,  # [num_seqs, heads, DIM], contiguous; written for sequences in one part
    partial,  # of `Division.partial`, for the others
    partial_log,
    items,
    spans,
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
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (part, K/V head): attend; the heads of the group share each read of K and V.

    The running softmax of a sequence's first part begins with the sinks. The grid covers the largest number of parts.
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    if part >= tl.load(items):
        return
    item = items + (1 + part) * ITEM
    seq, begin, end, place = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    whole = begin + (end - begin) // KEYS * KEYS
    length = tl.load(total_len + seq)

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
        top = tl.where(place == 0, tl.load(sinks + head, mask=rows < GROUP, other=0.0) * LOG2_E, top)
        total = tl.where(place == 0, total + 1.0, total)
    position = tl.zeros([ROWS], dtype=tl.int32) + (length - 1)
    pages = kv + kv_head.to(tl.int64) * stride_head
    blocks = table + seq.to(tl.int64) * stride_table
    acc, top, total = attend(
        query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, begin, whole, position, position,
        scale, cap, DIM, SLOTS, KEYS, BLOCK_D, 0, CAPPED, False, PRECISION, PEAK,
    )  # fmt: skip
    acc, top, total = attend(
        query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, whole, end, position, position,
        scale, cap, DIM, SLOTS, KEYS, BLOCK_D, 0, CAPPED, True, PRECISION, PEAK,
    )  # fmt: skip
    store_mean(
        acc, top, total, out, partial, partial_log, part, tl.load(spans + seq * SPAN + 1) == 1, seq, heads, head, dims,
        rows < GROUP, DIM,
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
    division: Division,
    tile: Tile,
) -> None:
    """Write the attention of the plan's decodes to the front of `out` [T, heads, dim], contiguous.

    division: of these decodes by tiles of the tile's keys, within the window."""
    heads, dim = q.shape[1:]
    _, _, kv_heads, slots, _ = kv_layer.shape
    words = pool_words(kv_layer)
    mean, log = division.partial(heads, dim)
    decode_kernel[(division.count, kv_heads)](
        q, words, out, mean, log, division.items, division.spans, out if sinks is None else sinks,
        plan.block_table, plan.total_len,
        q.stride(0), q.stride(1), *kv_layer.stride()[:4], plan.block_table.stride(0), heads,
        scale * LOG2_E.value, cap * LOG2_E.value,
        GROUP=heads // kv_heads, DIM=dim, SLOTS=slots, ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=tile.dim,
        WINDOW=window, CAPPED=cap > 0, SINKS=sinks is not None,
        PRECISION=precision_of(q), PEAK=peak_of(kv_layer),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    division.merge(mean, log, out[: plan.num_decodes])
