# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Drawing tokens as one launch for all rows, each by a program: see `Ops.draw`. Nothing waits for the device.

Thresholds of top_k and top_p are found by bisection over the bits of the values, so nothing is sorted: a value survives
top_k where fewer than k are larger, and top_p where the larger ones together have less than p of the mass.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.draw import NoiseKeys, is_greedy
from kernels.masking import Masks
from kernels.noise import row_key
from kernels.staging import Staging
from protocol.sampling import SamplingParams

_TILE = 4096
_LEAST = tl.constexpr(-(1 << 31))
_NONE = tl.constexpr(-1)
_MIX0 = tl.constexpr(0x21F0AAAD)
_MIX1 = tl.constexpr(0x735A2D97)
COLUMNS = 7
"""Of a row of the table, in 32 bits each: temperature (0: greedy), log of min_p, top_p, top_k, key (low, high), and
where its mask begins behind the table (0: the one that allows everything)."""


@triton.jit
def values_of(logits, mask, at, live, temperature):
    """Logits of these tokens, -inf where the mask forbids them, by the temperature."""
    value = tl.load(logits + at, mask=live, other=float("-inf"))
    word = tl.load(mask + at // 32, mask=live, other=0)
    value = tl.where(((word >> (at % 32)) & 1) == 1, value, float("-inf"))
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def order(value):
    """Integers in the order of the values, equal where these are."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def shifted(bits, count: tl.constexpr):
    """Logical right shift of int32."""
    return (bits >> count) & ((1 << (32 - count)) - 1)


@triton.jit
def gumbel(index, low, high):
    """As `kernels.noise.gumbel_at`."""
    bits = index ^ low
    bits = (bits ^ shifted(bits, 16)) * _MIX0
    bits = ((bits ^ shifted(bits, 15)) + high) * _MIX1
    bits = bits ^ shifted(bits, 15) ^ high
    bits = bits * _MIX0
    bits = bits ^ shifted(bits, 16)
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log(1 - u) by Kahan: exact where 1 - u rounds.
    rest = 1.0 - uniform
    near = tl.where(rest == 1.0, 0.5, rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(near) * (uniform / (1.0 - near)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["stride_row", "vocab", "count"])
def draw_kernel(logits, table, out, stride_row, vocab, count, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row). table: int32 [count, COLUMNS], masks behind it, of which the first forbids nothing."""
    row = tl.program_id(0)
    own = table + row * COLUMNS
    temperature = tl.load(own).to(tl.float32, bitcast=True)
    log_min_p = tl.load(own + 1).to(tl.float32, bitcast=True)
    top_p = tl.load(own + 2).to(tl.float32, bitcast=True)
    top_k, low, high = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    mask = table + count * COLUMNS + tl.load(own + 6)
    logits += row.to(tl.int64) * stride_row
    offsets = tl.arange(0, TILE)

    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    best, found, bad = float("-inf"), vocab * 0, vocab * 0
    for start in range(0, vocab, TILE):
        at = start + offsets
        value = values_of(logits, mask, at, at < vocab, divisor)
        bad += tl.sum((value != value).to(tl.int32), 0)
        value = tl.where(value != value, float("-inf"), value)
        top = tl.max(value, 0)
        first = tl.min(tl.where(value == top, at, vocab), 0)
        found = tl.where(top > best, first, found)
        best = tl.maximum(best, top)
    sound = (bad == 0) & (best > float("-inf")) & (best < float("inf"))
    if sound & (temperature > 0.0):
        floor = best + log_min_p
        least = _LEAST + best.to(tl.int64) * 0
        if top_k < vocab:
            for bit in range(32):
                tried = least + (tl.full([], 1, tl.int64) << (31 - bit))
                number = vocab * 0
                for start in range(0, vocab, TILE):
                    at = start + offsets
                    value = values_of(logits, mask, at, at < vocab, divisor)
                    value = tl.where(value < floor, float("-inf"), value)
                    number += tl.sum(((order(value) >= tried) & (at < vocab)).to(tl.int32), 0)
                least = tl.where(number >= top_k, tried, least)
        if top_p < 1.0:
            total = best * 0.0
            for start in range(0, vocab, TILE):
                at = start + offsets
                value = values_of(logits, mask, at, at < vocab, divisor)
                kept = (value >= floor) & (order(value) >= least)
                total += tl.sum(tl.where(kept, tl.exp(value - best), 0.0), 0)
            lowest = _LEAST + best.to(tl.int64) * 0
            for bit in range(32):
                tried = lowest + (tl.full([], 1, tl.int64) << (31 - bit))
                mass = best * 0.0
                for start in range(0, vocab, TILE):
                    at = start + offsets
                    value = values_of(logits, mask, at, at < vocab, divisor)
                    kept = (value >= floor) & (order(value) >= least) & (order(value) >= tried)
                    mass += tl.sum(tl.where(kept, tl.exp(value - best), 0.0), 0)
                lowest = tl.where(mass >= top_p * total, tried, lowest)
            least = tl.maximum(least, tl.minimum(lowest, order(best)))
        most = float("-inf")
        for start in range(0, vocab, TILE):
            at = start + offsets
            value = values_of(logits, mask, at, at < vocab, divisor)
            kept = (value >= floor) & (order(value) >= least) & (value > float("-inf"))
            noisy = tl.where(kept, value + gumbel(at, low, high), float("-inf"))
            top = tl.max(noisy, 0)
            first = tl.min(tl.where(noisy == top, at, vocab), 0)
            found = tl.where(top > most, first, found)
            most = tl.maximum(most, top)
    tl.store(out + row, tl.where(sound, found, _NONE).to(tl.int64))


def table_of(params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks, vocab: int) -> np.ndarray:
    """int32, flat: the rows of the table, then the masks, the first of which allows everything."""
    words = -(-vocab // 32)
    numbers = np.zeros((len(params), COLUMNS), dtype=np.float32)
    table = numbers.view(np.int32)
    parts = [np.full(words, -1, dtype=np.int32)]
    for i, (each, seed, position) in enumerate(zip(params, keys.seeds, keys.positions, strict=True)):
        key = np.array([row_key(seed, position)], dtype=np.uint64).view(np.int32)
        numbers[i, 0] = 0.0 if is_greedy(each) else each.temperature
        numbers[i, 1] = np.log(np.float32(each.min_p)) if each.min_p > 0.0 else -np.inf
        numbers[i, 2] = each.top_p
        table[i, 3] = each.top_k if 0 < each.top_k < vocab else vocab
        table[i, 4:6] = key
        mask = masks[i] if masks else None
        if mask is not None:
            table[i, 6] = words * len(parts)
            parts.append(mask[:words])
    return np.concatenate([table.reshape(-1), *parts])


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks, staging: Staging
) -> torch.Tensor:
    """As in `Ops`."""
    logits = logits.contiguous()
    count, vocab = logits.shape
    (table,) = staging.put([table_of(params, keys, masks, vocab)])
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        draw_kernel[(count,)](
            logits, table, out, logits.stride(0), vocab, count, TILE=_TILE, COLUMNS=COLUMNS, num_warps=16
        )
    return out
