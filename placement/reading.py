"""What a node has of a prompt, in its pool or on its disk, and the seconds until it has all of it."""

from __future__ import annotations

from typing import NamedTuple

from placement.blocks import cached_len
from placement.terms import Demand, NodeView


class Brought(NamedTuple):
    """cached_len: tokens that are not computed; seconds: of reading those that are not in the pool, and of computing
    the rest."""

    cached_len: int
    seconds: float


def brought(node: NodeView, demand: Demand) -> Brought:
    """By the node itself. It reads from its disk where that takes less time than computing, as the node does."""
    own = cached_len(node, demand) if node.cached_len or demand.beside else 0
    if node.kept_len > own and (read_s := node.lease.rates.read_block_s):
        size = node.lease.block_size
        kept = min(node.kept_len, demand.total_len - 1) // size * size
        seconds = (kept - own) / size * read_s
        if kept > own and seconds < (kept - own) / node.rate:
            return Brought(kept, seconds + (demand.total_len - kept) / node.rate)
    return Brought(own, (demand.total_len - own) / node.rate)


def found_len(node: NodeView, demand: Demand) -> int:
    """Tokens that are not computed there, unless they are fetched."""
    return brought(node, demand).cached_len if node.kept_len else cached_len(node, demand)
