# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Triton kernel that samples a whole batch in one launch (`Ops.draw`), without a device sync.

Bisection over the bits of the values finds the thresholds of top_k and top_p, so nothing is sorted. Of each lane only
the largest value is kept in registers: these show which thresholds are too low, and the search continues above them."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.gumbel_noise import row_key
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.sampling import NoiseKeys, is_greedy
from kvferry.kernels.token_masks import Masks
from kvferry.protocol.sampling import SamplingParams

_TILE = 4096
_MAX_TILES = 256
"""Maximum number of tiles of a vocabulary: a byte holds a tile's number."""
_LOWEST = tl.constexpr(-(1 << 31))
_NONE = tl.constexpr(-1)
_MARGIN = tl.constexpr(1.0001)
"""Factor by which the mass of the lanes' largest values must exceed the target, for rounding in another order."""
_MIX0 = tl.constexpr(0x21F0AAAD)
_MIX1 = tl.constexpr(0x735A2D97)
COLUMNS = 7
"""32-bit numbers per row of the table.

They are: temperature (0: greedy), log of min_p, top_p, top_k, key (low, high), and the offset of its mask after the
table (0: the mask that allows everything)."""


@triton.jit
def order(value):
    """Return int32 in the order of the values; equal values give equal results."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def weight_of(value, best, MASS: tl.constexpr):
    """Return a value's weight in a search: its unnormalised share of the mass, or 1."""
    return tl.exp(value - best) if MASS else tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def search_lanes(peak, live, best, target, MASS: tl.constexpr):
    """Return the largest threshold above which the values [TILE] have the target weight, int64; _LOWEST if none has."""
    rank, weight = order(peak), weight_of(peak, best, MASS)
    found = _LOWEST + tl.full([], 0, tl.int64)
    for bit in range(32):
        tried = found + (tl.full([], 1, tl.int64) << (31 - bit))
        sum = tl.sum(tl.where(live & (rank >= tried.to(tl.int32)), weight, 0.0), 0)
        found = tl.where(sum >= target, tried, found)
    return found


@triton.jit
def search(values, lane, held, depth, first, best, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """Search as `search_lanes` does, over all values of the lanes, two bits of the threshold a pass.

    A lane's values are values[lane], values[TILE + lane], .., as long as their order is not below `first`."""
    found = _LOWEST + tl.full([], 0, tl.int64)
    for pair in range(16):
        step = tl.full([], 1, tl.int64) << (30 - 2 * pair)
        low, middle, high = (
            (found + step).to(tl.int32),
            (found + 2 * step).to(tl.int32),
            (found + 3 * step).to(tl.int32),
        )
        sum_low = tl.zeros([TILE], dtype=tl.float32)
        sum_middle = tl.zeros([TILE], dtype=tl.float32)
        sum_high = tl.zeros([TILE], dtype=tl.float32)
        for place in range(depth):
            value = tl.load(values + place * TILE + lane, mask=place < held, other=float("-inf"))
            rank = order(value)
            weight = tl.where((place < held) & (rank >= first), weight_of(value, best, MASS), 0.0)
            sum_low += tl.where(rank >= low, weight, 0.0)
            sum_middle += tl.where(rank >= middle, weight, 0.0)
            sum_high += tl.where(rank >= high, weight, 0.0)
        some = tl.sum(sum_low, 0) >= target
        more = tl.sum(sum_middle, 0) >= target
        most = tl.sum(sum_high, 0) >= target
        found += step * (some.to(tl.int64) + more.to(tl.int64) + most.to(tl.int64))
    return found


@triton.jit
def mass_of(values, lane, held, depth, first, best, TILE: tl.constexpr):
    """Return the sum of the weights of the lanes' values whose order is not below `first`."""
    total = tl.zeros([TILE], dtype=tl.float32)
    for place in range(depth):
        value = tl.load(values + place * TILE + lane, mask=place < held, other=float("-inf"))
        total += tl.where((place < held) & (order(value) >= first), tl.exp(value - best), 0.0)
    return tl.sum(total, 0)


@triton.jit
def shifted(bits, count: tl.constexpr):
    """Return the logical right shift of int32."""
    return (bits >> count) & ((1 << (32 - count)) - 1)


@triton.jit
def gumbel(index, low, high):
    """Compute `kernels.gumbel_noise.gumbel_at`."""
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


@triton.jit(do_not_specialize=["count"])
def draw_kernel(logits, tiles, table, out, stride_row, vocab, count, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row): draw a token.

    logits: overwritten. tiles: uint8 of their shape, scratch memory. table: int32 [count, COLUMNS], followed by masks,
    the first of which allows everything."""
    row = tl.program_id(0)
    own = table + row * COLUMNS
    temperature = tl.load(own).to(tl.float32, bitcast=True)
    log_min_p = tl.load(own + 1).to(tl.float32, bitcast=True)
    top_p = tl.load(own + 2).to(tl.float32, bitcast=True)
    top_k, low, high, mask = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    words = table + count * COLUMNS + mask
    logits += row.to(tl.int64) * stride_row
    tiles += row.to(tl.int64) * stride_row
    lane = tl.arange(0, TILE)
    random = temperature > 0.0
    divisor = tl.where(random, temperature, 1.0)
    written = tl.where(random, vocab, 0)

    # Write back masked and divided values; keep each lane's largest one and its first place.
    peak = tl.full([TILE], float("-inf"), dtype=tl.float32)
    place_of = tl.zeros([TILE], dtype=tl.int32) + vocab
    bad = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, vocab, TILE):
        at = start + lane
        value = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        if mask > 0:
            word = tl.load(words + at // 32, mask=at < vocab, other=0)
            value = tl.where(((word >> (at % 32)) & 1) == 1, value, float("-inf"))
        value = tl.div_rn(value, tl.zeros_like(value) + divisor)
        bad += (value != value).to(tl.int32)
        place_of = tl.where(value > peak, at, place_of)
        peak = tl.where(value > peak, value, peak)
        tl.store(logits + at, value, mask=at < written)
    best = tl.max(peak, 0)
    found = tl.min(tl.where(peak == best, place_of, vocab), 0)
    sound = (tl.sum(bad, 0) == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.debug_barrier()

    if sound & random:
        held = tl.cdiv(tl.maximum(vocab - lane, 0), TILE)
        depth = tl.cdiv(vocab, TILE)
        bottom = tl.where(log_min_p > float("-inf"), best + log_min_p, float("-inf"))
        lower_bound = order(bottom).to(tl.int64)
        cut = (top_k < vocab) | (top_p < 1.0)
        noted = tl.where(cut, vocab, 0)
        if cut:
            there = (lane < vocab) & (order(peak) >= lower_bound.to(tl.int32))
            total = best * 0.0
            if top_k < vocab:
                enough = search_lanes(peak, there, best, top_k.to(tl.float32), False)
            else:
                total = mass_of(logits, lane, held, depth, lower_bound.to(tl.int32), best, TILE)
                enough = search_lanes(peak, there, best, top_p * total * _MARGIN, True)
            lower_bound = tl.maximum(lower_bound, enough)
            # Values that are not below move to the front of their lane, beside the number of their tile.
            moved = tl.zeros([TILE], dtype=tl.int32)
            for tile in range(depth):
                at = tile * TILE + lane
                value = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
                kept = (at < vocab) & (order(value) >= lower_bound.to(tl.int32)) & (value > float("-inf"))
                tl.store(logits + moved * TILE + lane, value, mask=kept)
                tl.store(tiles + moved * TILE + lane, (tl.zeros_like(lane) + tile).to(tl.uint8), mask=kept)
                moved += kept.to(tl.int32)
            held, depth = moved, tl.max(moved, 0)
            tl.debug_barrier()
            if top_k < vocab:
                kth = search(logits, lane, held, depth, _LOWEST, best, top_k.to(tl.float32), False, TILE)
                lower_bound = tl.maximum(lower_bound, kth)
                total = mass_of(logits, lane, held, depth, lower_bound.to(tl.int32), best, TILE)
            if top_p < 1.0:
                target = top_p * total
                lowest = search(logits, lane, held, depth, lower_bound.to(tl.int32), best, target, True, TILE)
                lower_bound = tl.maximum(lower_bound, tl.minimum(lowest, order(best).to(tl.int64)))
        most = tl.full([TILE], float("-inf"), dtype=tl.float32)
        winner = tl.zeros([TILE], dtype=tl.int32) + vocab
        for place in range(depth):
            at = place * TILE + lane
            live = place < held
            value = tl.load(logits + at, mask=live, other=float("-inf"))
            tile = tl.load(tiles + at, mask=live & (at < noted), other=0).to(tl.int32)
            token = tl.where(at < noted, tile * TILE + lane, at)
            kept = live & (order(value) >= lower_bound.to(tl.int32)) & (value > float("-inf"))
            noisy = tl.where(kept, value + gumbel(token, low, high), float("-inf"))
            winner = tl.where(noisy > most, token, winner)
            most = tl.maximum(most, noisy)
        found = tl.min(tl.where(most == tl.max(most, 0), winner, vocab), 0)
    tl.store(out + row, tl.where(sound, found, _NONE).to(tl.int64))


def table_of(params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks, vocab: int) -> np.ndarray:
    """Return int32, flat: the rows of the table, then the masks, the first of which allows everything."""
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
    """Implement `Ops.draw`."""
    logits = logits.contiguous()
    count, vocab = logits.shape
    assert vocab <= _MAX_TILES * _TILE
    (table,) = staging.put([table_of(params, keys, masks, vocab)])
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    tiles = torch.empty(logits.shape, dtype=torch.uint8, device=logits.device)
    if count:
        draw_kernel[(count,)](
            logits, tiles, table, out, logits.stride(0), vocab, count, TILE=_TILE, COLUMNS=COLUMNS, num_warps=16
        )
    return out
