"""Prefix of a prompt that a node can read from its pool and slower tiers, and the seconds to read it."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.placement.blocks import cached_len
from kvferry.placement.types import Demand, NodeView


class TierRead(NamedTuple):
    """Prefix that a node reads from its own tiers and the shared store.

    cached_len  tokens that are not computed
    seconds     to read the tokens that are not in the pool, and to compute the rest
    """

    cached_len: int
    seconds: float


def own_read_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds until the node has the whole prompt without a fetch.

    It is called for every node, nearly all of which hold nothing."""
    if node.cached_len or node.kept or node.key == demand.beside:
        return tier_read(node, demand).seconds
    return demand.total_len / node.rate - demand.stored_len * node.gain_s


def tier_read(node: NodeView, demand: Demand) -> TierRead:
    """Return the part of a prompt that the node itself reads from its tiers.

    It reads from each tier, and then from the shared store, the tokens that faster tiers lack, if reading is faster
    than computing."""
    reached = cached_len(node, demand)
    total, rate, size, seconds = demand.total_len, node.rate, node.lease.block_size, 0.0
    for tokens, block_s in (*node.kept, (demand.stored_len, node.lease.rates.store_block_s)):
        if tokens <= reached or not block_s:
            continue
        upto = min(tokens, total - 1) // size * size
        read_s = (upto - reached) / size * block_s
        if upto > reached and read_s < (upto - reached) / rate:
            reached, seconds = upto, seconds + read_s
    return TierRead(reached, seconds + (total - reached) / rate)


def reused_len(node: NodeView, demand: Demand) -> int:
    """Return the tokens that the node does not compute, without a fetch."""
    if node.cached_len or node.kept or node.key == demand.beside:
        return tier_read(node, demand).cached_len
    return demand.stored_len if node.gain_s else 0
