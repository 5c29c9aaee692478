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


First = tuple[float, float, NodeView]
"""Prefill node: seconds to the first token with penalties, seconds of computing, node.

A plain tuple for speed: each placement makes one per node."""
Ready = tuple[float, int, NodeView]
"""Decode node: seconds from the first token to the next one without the ship, prompt blocks that it lacks, node."""


def exposed_s(blocks: int, last: int, block_s: float, compute_s: float) -> float:
    """Return the seconds of shipping that computing does not hide.

    blocks are shipped at block_s seconds each, while later ones are computed. Only the `last` ones, which the prompt's
    last chunk fills, are always exposed."""
    return max(blocks * block_s - compute_s, min(blocks, last) * block_s)


def pair_s(demand: Demand, first: First, ready: Ready) -> float:
    """Return the cost of a pair in seconds; inf if the pair may not ship blocks."""
    (first_s, compute_s, prefill), (decode_s, blocks, decode) = first, ready
    if demand.broken and not unbroken(demand, prefill.key, decode.key):
        return inf
    last = blocks_for(CHUNK_TOKENS, prefill.lease.block_size)
    return first_s + decode_s + exposed_s(blocks, last, prefill.block_s, compute_s)


def cheapest_pair(demand: Demand, firsts: Sequence[First], readies: Sequence[Ready]) -> tuple[float, First, Ready]:
    """Return the lowest cost and its pair, as if every pair had been tried in turn order.

    The cost is inf if all pairs are broken. A decode node matters only by its wait and the blocks that it lacks. A node
    that is no better than another in both is excluded, since more blocks never cost less. If no decode node holds
    prompt blocks one node remains, otherwise at most one per length held. Each of these f nodes is paired with prefill
    nodes in order of their first token, until the two halves alone cost more than the best pair. Equal prefill nodes
    count once, and those whose first token is too late are excluded. O(p + d + f * q) for p prefill and d decode nodes,
    and q of the former near the earliest first token. A node in a broken pair excludes no other node; f or q grow by
    the number of such nodes."""
    named = {key for pair in demand.broken for key in pair}
    readies = _front(readies, named)
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


def _front(readies: Iterable[Ready], named: Container[NodeKey | None]) -> list[Ready]:
    """Return the first node in turn with the least wait for each number of lacking blocks, and all named ones."""
    front: dict[int, Ready] = {}
    kept: list[Ready] = []
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
    demand: Demand, firsts: Sequence[First], front: Iterable[Ready], named: Container[NodeKey | None]
) -> Sequence[First]:
    """Return the prefill nodes that may be in the cheapest pair, and all named.

    Of nodes that no pair distinguishes, only the first in turn is returned."""
    kept = [first for first in firsts if first[-1].key in named] if named else []
    others = [first for first in firsts if first[-1].key not in named] if kept else firsts
    if not others:
        return kept
    soonest = min(others, key=itemgetter(0))
    costs = [(pair_s(demand, soonest, ready), ready[0]) for ready in front]
    limit_s = max([cost_s - ready_s for cost_s, ready_s in costs if cost_s < inf], default=inf) * ROUNDING
    near: dict[tuple[float, float, float, int], First] = {}
    for first in [first for first in others if first[0] <= limit_s]:
        first_s, compute_s, node = first
        kind = (first_s, compute_s, node.block_s, node.lease.block_size)
        known = near.get(kind)
        if known is None or node.turn < known[-1].turn:
            near[kind] = first
    return [*near.values(), *kept]
