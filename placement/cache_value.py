"""Value of cached blocks to future requests, in seconds."""

from __future__ import annotations

from kvferry.placement.blocks import uncached_len
from kvferry.placement.tier_reads import found_len
from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.layout import blocks_for

WEIGHT = 0.02
"""Of one more prompt in the average of what was reused."""
MOST = 2.0
"""Times that a cached token is expected to be reused. What leaves a pool first was used longest ago, and is worth less
than the average."""


class CacheValue:
    """Learned reuse of cached tokens: reused over computed tokens in the long run.

    Nothing is known at first."""

    def __init__(self) -> None:
        self._reused = self._computed = 0.0

    @property
    def times(self) -> float:
        return min(MOST, self._reused / self._computed) if self._computed > 0 else 0.0

    def saw(self, reused: int, length: int) -> None:
        """A prompt of so many tokens."""
        self._reused += WEIGHT * (reused - self._reused)
        self._computed += WEIGHT * (length - reused - self._computed)


def displaced_blocks(node: NodeView, demand: Demand) -> int:
    """Cached blocks that leave a node's pool for the prompt, behind those that wait there."""
    load, size = node.lease.load, node.lease.block_size
    fresh = blocks_for(uncached_len(node, demand), size)
    return min(max(0, fresh - node.unasked_blocks), load.cached_blocks)


def displaced_s(node: NodeView, demand: Demand) -> float:
    """Seconds of computing again, some day, what the prompt drives out of the node's cache.

    Where much is shared and pools are full, another copy of a prefix costs more than computing it."""
    if not demand.worth:
        return 0.0
    tokens = displaced_blocks(node, demand) * node.lease.block_size
    return demand.worth * tokens / node.rate


def spared_s(node: NodeView, demand: Demand, queue_s: float) -> float:
    """Seconds that others wait less for what need not be computed, where all prompts wait for `queue_s` at least: as
    many such prompts stand behind it as that takes to compute. So what is cached may cost a longer queue, in proportion
    to the shortest one: where there is too much to compute, computing less goes before computing soon. Nothing where
    prompts share nothing."""
    return queue_s * found_len(node, demand) / demand.total_len if demand.worth else 0.0
