"""Search for the cheapest (prefill, decode) pair without trying each pair."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from math import inf
from operator import itemgetter

from kvferry.placement.types import Demand, NodeKey, NodeView, unbroken
from kvferry.protocol.layout import blocks_for

CHUNK_TOKENS = 256
"""The last chunk of a prompt is shipped after its last token was computed, so its bytes are always exposed."""
ROUNDING = 1 + 1e-9
"""Sums of the same seconds in another order differ by less."""


First = tuple[float, float, NodeView]
"""A prefill node: seconds to the first token with what it is doubted, and those of computing. Plain tuples: there are
as many as nodes, for each placement."""
Ready = tuple[float, int, NodeView]
"""A decode node: seconds from the first token on until it goes on, but for the ship, and blocks that it lacks."""


def exposed_s(blocks: int, last: int, block_s: float, compute_s: float) -> float:
    """Seconds of shipping `blocks` at `block_s` each that computing cannot hide: they travel while later ones are
    computed, except the `last` ones, which the prompt's last chunk fills."""
    return max(blocks * block_s - compute_s, min(blocks, last) * block_s)


def pair_s(demand: Demand, first: First, ready: Ready) -> float:
    """Return the cost of a pair in seconds; inf where no blocks may go from one to the other."""
    (first_s, compute_s, prefill), (decode_s, blocks, decode) = first, ready
    if demand.broken and not unbroken(demand, prefill.key, decode.key):
        return inf
    last = blocks_for(CHUNK_TOKENS, prefill.lease.block_size)
    return first_s + decode_s + exposed_s(blocks, last, prefill.block_s, compute_s)


def cheapest_pair(demand: Demand, firsts: Sequence[First], readies: Sequence[Ready]) -> tuple[float, First, Ready]:
    """Its cost (inf: all are broken) and halves, as if every pair had been tried in turn order.

    A decode node matters by its wait and the blocks it lacks. Anyone who is beaten or equalled in both is left out:
    more blocks never cost less. Without any of the prompt's blocks on decode one node is left, otherwise no more than
    there are different lengths held. Each of these f is paired with prefill nodes from the soonest first token on,
    until the two halves alone cost more than the best pair. Prefill nodes that are alike count once, as do those that
    lose by their first token alone. O(p + d + f * q) for p prefill and d decode nodes, q of the former near the
    soonest. A node that is part of a broken pair beats nobody: f or q grow by as many.
    """
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
    """Of those that lack the same blocks the soonest, and of those the first in turn; with all that are named."""
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
    """Those that may be the cheapest half of a pair; of those that no pair tells apart the first in turn.

    With all that are named."""
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
