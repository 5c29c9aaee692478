# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Inner loop of Triton's prefill and decode attention: online softmax over pages of K and V (FlashAttention).

The running softmax is that of Milakov and Gimelshein (2018) as used by FlashAttention (Dao et al. 2022), in base two.
"""

import triton
import triton.language as tl

from kvferry.kernels.triton.eight_bits import number, scales_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def slots_of(table, start, end, stride_block, WIDTH, SLOTS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return KEYS positions from start on, which are before end, and the offsets of their vectors (WIDTH elements)."""
    position = start + tl.arange(0, KEYS)
    if MASKED:
        inside = position < end
        block = tl.load(table + position // SLOTS, mask=inside, other=0)
    else:
        inside = position >= 0
        block = tl.load(table + position // SLOTS)
    return position, inside, block.to(tl.int64) * stride_block + (position % SLOTS) * WIDTH


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Return the first position that a token at `position` attends to (`protocol.attention_window`)."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    elif WINDOW < 0:
        return position // -WINDOW * -WINDOW
    else:
        return position * 0


@triton.jit
def weigh(score, top, total):
    """Return the weights of the scores, the factor for the sum so far, and the new top and total."""
    new_top = tl.maximum(top, tl.max(score, 1))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - pivot[:, None])
    decay = tl.exp2(top - pivot)
    return weight, decay, new_top, total * decay + tl.sum(weight, 1)


@triton.jit
def attend(
    q,  # [ROWS, BLOCK_D]
    acc,  # float32 [ROWS, BLOCK_D], weighted sum of V so far
    top,  # float32 [ROWS], largest score so far
    total,  # float32 [ROWS], sum of weights so far
    kv,  # K of this layer and head; V is stride_kv further
    table,  # int32, block ids of this sequence
    stride_block,
    stride_kv,
    stride_slot,
    begin,
    end,
    row_position,  # int32 [ROWS], position of each row's query token
    row_last,  # int32 [ROWS], last position that it sees
    scale,  # softmax scale * log2(e)
    cap,  # of scores * log2(e), if CAPPED
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # False: [begin, end) is whole tiles that every row sees in full
    PRECISION: tl.constexpr,
    PEAK: tl.constexpr,  # 8-bit numbers, each vector's scale after it (kernels/quantised_cache.py); 0: none
):
    """Add the positions [begin, end) to (acc, top, total). Slots that no row may see are not read."""
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, KEYS):
        # The compiler must know the width of a vector, or it reads byte by byte.
        width = DIM + 4 if PEAK else stride_slot
        position, inside, offset = slots_of(table, start, end, stride_block, width, SLOTS, KEYS, MASKED)
        live = inside[:, None] & (dims < DIM)[None, :]
        where = kv + offset[:, None] + dims[None, :]
        k = tl.load(where, mask=live, other=0)
        if PEAK:
            k = number(k, PEAK)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if PEAK:
            score *= scales_of(kv + offset, inside, DIM, PEAK)[None, :]
        if CAPPED:  # cap * tanh(score / cap), for e^2x = 2^(2x log2(e))
            score = cap * (1.0 - 2.0 / (tl.exp2(score / cap * 2.8853900817779268) + 1.0))
        if MASKED:
            seen = inside[None, :] & (position[None, :] <= row_last[:, None])
            if WINDOW != 0:
                seen = seen & (position[None, :] >= first_seen(row_position, WINDOW)[:, None])
            score = tl.where(seen, score, float("-inf"))
        weight, decay, top, total = weigh(score, top, total)
        v = tl.load(where + stride_kv, mask=live, other=0)
        if PEAK:
            v = number(v, PEAK)
            v_scale = scales_of(kv + stride_kv + offset, inside, DIM, PEAK)
            if q.dtype == tl.float16:  # float16 does not hold a small weight times a scale
                v = v.to(tl.float32) * v_scale[:, None]
            else:
                weight *= v_scale[None, :]
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision=PRECISION)
    return acc, top, total
