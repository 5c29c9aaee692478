"""Token and block counts of a request on one node: cached, shipped, new and missing, and whether it fits."""

from __future__ import annotations

from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.layout import blocks_for

EXPECTED_OUTPUT = 128
"""Expected tokens until a running request frees its blocks; used only while a decode node is full."""
MIN_STEP_S = 1e-4
"""Lower bound of a decode step's time, in seconds."""


def cached_len(node: NodeView, demand: Demand) -> int:
    """Return the tokens of the prompt that the node has cached, in whole blocks.

    At least one token is always computed. On the node of the request that this one forks from, all tokens but the last
    are cached."""
    if not node.cached_len and demand.beside is None:
        return 0
    if demand.beside is not None and node.key == demand.beside:
        return demand.total_len - 1
    return held_len(node, demand)


def held_len(node: NodeView, demand: Demand) -> int:
    """Return the tokens of the prompt that the node holds in whole blocks, without the last token."""
    size = node.lease.block_size
    return min(node.cached_len, demand.total_len - 1) // size * size


def uncached_len(node: NodeView, demand: Demand) -> int:
    """Return how many of the request's tokens the node must compute."""
    return demand.total_len - cached_len(node, demand)


def shipped_blocks(node: NodeView, demand: Demand) -> int:
    """Return the number of blocks that a decode node does not hold: of the prompt, and of its state or windows."""
    size = node.lease.block_size
    return node.lease.blocks_with(blocks_for(demand.total_len, size) - cached_len(node, demand) // size)


def new_blocks(node: NodeView, demand: Demand) -> int:
    """Return the number of blocks that the request adds to a decode node's pool."""
    size = node.lease.block_size
    return node.lease.blocks_with(blocks_for(demand.total_len + 1, size) - cached_len(node, demand) // size)


def missing_blocks(node: NodeView, demand: Demand) -> int:
    """Return the number of blocks that must be freed before the request can run; 0 or less if none."""
    load, size, free = node.lease.load, node.lease.block_size, node.free_blocks
    chain = blocks_for(demand.total_len + 1, size)
    if node.lease.blocks_with(chain) <= free or load.total_blocks == 0:
        return 0
    held = cached_len(node, demand) // size
    return node.lease.blocks_with(chain - held) - free - max(0, load.cached_blocks - held)


def crowded(node: NodeView) -> bool:
    """Return whether requests on the node wait for blocks of other requests."""
    load = node.lease.load
    return load.total_blocks > 0 and (load.waiting_requests > 0 or node.free_blocks + load.cached_blocks < 0)


def fits(node: NodeView, demand: Demand) -> bool:
    """Return whether the request fits into the node's whole pool."""
    return demand.total_len < node.pool_tokens


def has_capacity(node: NodeView, demand: Demand) -> bool:
    """Return whether a decode node accepts the request, even if it has to wait there."""
    return fits(node, demand) and (demand.recovers or new_blocks(node, demand) <= node.spare_blocks)


def freed_per_s(node: NodeView) -> float:
    """Return the blocks per second that a decode node's requests will free, once all requests that fit run.

    Right after a node's start, all its requests may still wait."""
    load = node.lease.load
    busy = max(1, load.active_blocks, min(load.total_blocks, load.active_blocks + node.pending_blocks))
    return busy / (EXPECTED_OUTPUT * max(node.lease.rates.step_s, MIN_STEP_S))
