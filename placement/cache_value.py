"""Expected value of cached blocks to future requests, in seconds: learned reuse, and what a placement evicts."""

from __future__ import annotations

from kvferry.placement.blocks import uncached_len
from kvferry.placement.tier_reads import reused_len
from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.layout import blocks_for

WEIGHT = 0.02
"""Weight of one prompt in the moving averages of reused and computed tokens."""
MAX_REUSES = 2.0
"""Maximum number of expected reuses of a cached token.

Evicted blocks are the least recently used ones, so they are worth less than the average."""


class CacheValue:
    """Learned reuse of cached tokens: the long-run ratio of reused to computed tokens; 0 before the first prompt."""

    def __init__(self) -> None:
        self._reused = self._computed = 0.0

    @property
    def times(self) -> float:
        """Return the expected number of reuses of a cached token, at most MOST."""
        return min(MAX_REUSES, self._reused / self._computed) if self._computed > 0 else 0.0

    def record(self, reused: int, length: int) -> None:
        """Record a prompt of `length` tokens, `reused` of them from a cache."""
        self._reused += WEIGHT * (reused - self._reused)
        self._computed += WEIGHT * (length - reused - self._computed)


def displaced_blocks(node: NodeView, demand: Demand) -> int:
    """Return the number of cached blocks that the prompt evicts from a node's pool, after the prompts queued there."""
    load, size = node.lease.load, node.lease.block_size
    fresh = node.lease.blocks_with(blocks_for(uncached_len(node, demand), size))
    return min(max(0, fresh - node.unclaimed_blocks), load.cached_blocks)


def displaced_s(node: NodeView, demand: Demand) -> float:
    """Return the expected seconds to recompute what the prompt evicts from the node's cache.

    If prefixes are often shared and pools are full, another copy of a prefix costs more than computing it."""
    if not demand.worth:
        return 0.0
    tokens = displaced_blocks(node, demand) * node.lease.block_size
    return demand.worth * tokens / node.rate


def saved_s(node: NodeView, demand: Demand, queue_s: float) -> float:
    """Return the seconds that later requests save because the node need not compute cached tokens.

    queue_s: shortest queue of all nodes. The prompts that can be computed in that time follow this one, and each waits
    less. So a cached prefix justifies a longer queue, in proportion to the shortest one: under overload, computing less
    matters more than starting early. 0 if prompts share no prefixes."""
    return queue_s * reused_len(node, demand) / demand.total_len if demand.worth else 0.0
