# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for paged causal attention of prompt chunks, with sliding windows, soft caps and sinks."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.triton.device_features import precision_of
from kvferry.kernels.triton.eight_bits import peak_of, pool_words
from kvferry.kernels.triton.online_softmax import LOG2_E, attend, first_seen
from kvferry.kernels.triton.tile_sizes import Tile


@triton.jit(do_not_specialize=["stride_table", "first_seq"])
def prefill_kernel(
    q,  # [T, heads, DIM]
    kv,
    out,  # [T, heads, DIM], contiguous
    sinks,  # float32 [heads], read if SINKS: the running softmax begins with them
    see_until,  # int32 [T], read if AHEAD (`BatchPlan.see_until`)
    table,
    query_start,
    total_len,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_head,
    stride_slot,
    stride_table,
    first_seq,
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
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,
):
    """Program (tile of rows, K/V head, sequence): attend.

    Row r of a sequence is head r % GROUP of query token r // GROUP, so the heads that share a K/V head share its reads
    at any group size. Later tiles, the longest, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, seq = tl.program_id(1), tl.program_id(2) + first_seq
    start = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - start
    computed_len = tl.load(total_len + seq) - query_len
    if tile * ROWS >= query_len * GROUP:
        return

    rows, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    position = computed_len + token
    last = position
    oldest = computed_len + tile * ROWS // GROUP
    newest = computed_len + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, query_len - 1)
    if AHEAD:
        last = tl.load(see_until + start + token, token < query_len, other=0)
        newest = tl.max(last)
    begin = computed_len * 0
    whole = (oldest + 1) // KEYS * KEYS
    if WINDOW != 0:
        begin = first_seen(oldest, WINDOW)
        whole = begin

    live = (token < query_len)[:, None] & (dims < DIM)[None, :]
    row = (start + token).to(tl.int64)
    query = tl.load(q + row[:, None] * stride_q_token + head[:, None] * stride_q_head + dims[None, :], live, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if SINKS:
        top = tl.load(sinks + head) * LOG2_E
        total += 1.0
    pages = kv + kv_head.to(tl.int64) * stride_head
    blocks = table + seq.to(tl.int64) * stride_table
    if WINDOW == 0:
        acc, top, total = attend(
            query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, begin, whole, position, last,
            scale, cap, DIM, SLOTS, KEYS, BLOCK_D, 0, CAPPED, False, PRECISION, PEAK,
        )  # fmt: skip
    acc, top, total = attend(
        query, acc, top, total, pages, blocks, stride_block, stride_kv, stride_slot, whole, newest + 1, position, last,
        scale, cap, DIM, SLOTS, KEYS, BLOCK_D, WINDOW, CAPPED, True, PRECISION, PEAK,
    )  # fmt: skip
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = out + (row[:, None] * heads + head[:, None]) * DIM + dims[None, :]
    tl.store(where, mean.to(out.dtype.element_ty), mask=live)


def prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    out: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None,
    max_rows: int,
    tile: Tile,
) -> None:
    """Write the attention of the plan's chunks to the back of `out` [T, heads, dim], contiguous.

    `max_rows`: query tokens of the longest chunk times the heads per K/V head."""
    heads, dim = q.shape[1:]
    _, _, kv_heads, slots, _ = kv_layer.shape
    words, see_until = pool_words(kv_layer), plan.see_until
    prefill_kernel[(triton.cdiv(max_rows, tile.rows), kv_heads, plan.num_seqs - plan.num_decodes)](
        q, words, out, out if sinks is None else sinks, out if see_until is None else see_until,
        plan.block_table, plan.query_start, plan.total_len,
        q.stride(0), q.stride(1), *kv_layer.stride()[:4], plan.block_table.stride(0), plan.num_decodes, heads,
        scale * LOG2_E.value, cap * LOG2_E.value,
        GROUP=heads // kv_heads, DIM=dim, SLOTS=slots, ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=tile.dim,
        WINDOW=window, CAPPED=cap > 0, SINKS=sinks is not None, AHEAD=see_until is not None,
        PRECISION=precision_of(q), PEAK=peak_of(kv_layer),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
