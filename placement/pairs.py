"""Search for the cheapest (prefill, decode) pair of nodes without trying each pair."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from math import inf
from operator import itemgetter

from kvferry.placement.types import Demand, NodeKey, NodeView, unbroken
from kvferry.protocol.layout import blocks_for

CHUNK_TOKENS = 256
"""Tokens of a prompt's last chunk.

Its blocks are shipped after its last token was computed, so their transfer is always exposed."""
ROUNDING = 1 + 1e-9
"""Bound of the relative rounding error between sums of the same seconds in different order."""


PrefillHalf = tuple[float, float, NodeView]
"""Prefill node: seconds to the first token with penalties, seconds of computing, node.

A plain tuple, for speed: each placement makes one per node."""
DecodeHalf = tuple[float, int, NodeView]
"""Decode node: seconds from the first token to the next one without the ship, missing prompt blocks, node."""


def exposed_s(blocks: int, last: int, block_s: float, compute_s: float) -> float:
    """Return the seconds of shipping that computing does not hide.

    blocks are shipped at block_s seconds each, while later ones are computed. Only the `last` ones, which the prompt's
    last chunk fills, are always exposed."""
    return max(blocks * block_s - compute_s, min(blocks, last) * block_s)


def pair_s(demand: Demand, first: PrefillHalf, ready: DecodeHalf) -> float:
    """Return the cost of a pair in seconds; inf if the pair may not ship blocks."""
    (first_s, compute_s, prefill), (decode_s, blocks, decode) = first, ready
    if demand.broken and not unbroken(demand, prefill.key, decode.key):
        return inf
    last = blocks_for(CHUNK_TOKENS, prefill.lease.block_size)
    return first_s + decode_s + exposed_s(blocks, last, prefill.block_s, compute_s)


def cheapest_pair(
    demand: Demand, firsts: Sequence[PrefillHalf], readies: Sequence[DecodeHalf]
) -> tuple[float, PrefillHalf, DecodeHalf]:
    """Return the lowest cost and its pair, as if every pair had been tried in turn order.

    The cost is inf if all pairs are broken.

    Only the wait and the missing blocks of a decode node matter, and more blocks never cost less. So a decode node that
    is no better than another in both is excluded: one remains if none holds prompt blocks, otherwise at most one per
    held length. Each of these f nodes is paired with prefill nodes in the order of their first token, until the two
    halves alone cost more than the best pair. Equal prefill nodes count once, and those whose first token is too late
    are excluded. A node in a broken pair excludes no other node; f or q grow by the number of such nodes.

    O(p + d + f * q) for p prefill nodes, d decode nodes, and q prefill nodes near the earliest first token."""
    named = {key for pair in demand.broken for key in pair}
    readies = _pareto_front(readies, named)
    firsts = _near(demand, firsts, readies, named)
    firsts = sorted(firsts, key=lambda first: (first[0], first[-1].turn))
    best, fewest = (inf, firsts[0], readies[0]), inf
    for ready in sorted(readies, key=lambda ready: (*ready[:2], ready[-1].turn)):
        decode_s, blocks, _ = ready
        if blocks >= fewest:
            continue
        whole = True
        for first in firsts:
            cost_s = pair_s(demand, first, ready)
            if cost_s == inf:
                whole = False
            elif first[0] + decode_s > best[0]:
                break
            elif cost_s < best[0]:
                best = (cost_s, first, ready)
        if whole:
            fewest = blocks
    return best


def _pareto_front(readies: Iterable[DecodeHalf], named: Container[NodeKey | None]) -> list[DecodeHalf]:
    """Return, for each number of missing blocks, the first node in turn with the least wait, and all named nodes."""
    front: dict[int, DecodeHalf] = {}
    kept: list[DecodeHalf] = []
    for ready in readies:
        decode_s, blocks, node = ready
        if named and node.key in named:
            kept.append(ready)
            continue
        known = front.get(blocks)
        if known is None or decode_s < known[0] or (decode_s == known[0] and node.turn < known[-1].turn):
            front[blocks] = ready
    return [*front.values(), *kept]


def _near(
    demand: Demand, firsts: Sequence[PrefillHalf], front: Iterable[DecodeHalf], named: Container[NodeKey | None]
) -> Sequence[PrefillHalf]:
    """Return the prefill nodes that may be in the cheapest pair, and all named nodes.

    Of nodes with equal costs in all pairs, only the first in turn is returned."""
    kept = [first for first in firsts if first[-1].key in named] if named else []
    others = [first for first in firsts if first[-1].key not in named] if kept else firsts
    if not others:
        return kept
    soonest = min(others, key=itemgetter(0))
    costs = [(pair_s(demand, soonest, ready), ready[0]) for ready in front]
    limit_s = max([cost_s - ready_s for cost_s, ready_s in costs if cost_s < inf], default=inf) * ROUNDING
    near: dict[tuple[float, float, float, int], PrefillHalf] = {}
    for first in [first for first in others if first[0] <= limit_s]:
        first_s, compute_s, node = first
        kind = (first_s, compute_s, node.block_s, node.lease.block_size)
        known = near.get(kind)
        if known is None or node.turn < known[-1].turn:
            near[kind] = first
    return [*near.values(), *kept]
