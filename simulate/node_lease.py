"""`lease_of`: builds the lease that a simulated node writes to the simulated registry."""

from __future__ import annotations

from kvferry.protocol.lease import Load, NodeLease
from kvferry.simulate.node import Node


def lease_of(node: Node) -> NodeLease:
    """Return the node's current lease."""
    rates = node.rates()
    machine, pool, prompts = node.machine, node.memory, node.prompts
    granted, running = sum(node.grants.held.values()), len(node.streams) + len(prompts.begun)
    waiting = len(node.tiers.reading) + len(prompts.waiting)
    load = Load(
        waiting, prompts.tokens, running, pool.free_blocks, pool.holds.num_held - granted,
        pool.cached_blocks, granted, pool.num_blocks, len(node.grants.held),
    )  # fmt: skip
    longest = machine.blocks * machine.block_size
    return NodeLease(
        node.name, node.role, node.epoch, "ready", "", "", "same", node.model, longest, machine.block_size,
        machine.block_bytes, load, rates, (), machine.max_num_seqs,
    )  # fmt: skip
