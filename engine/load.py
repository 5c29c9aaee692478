"""Computes an engine's load (requests, tokens, blocks and grants), which its node announces to routers."""

from __future__ import annotations

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import held_blocks
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.lease import Load


def current_load(request_table: RequestTable, pool: BlockPool) -> Load:
    """Return the current load."""
    holding_blocks = request_table.holding_blocks
    granted = [len(held_blocks(r)) - r.first_block for r in holding_blocks if r.grant is not None]
    return Load(
        waiting_requests=len(request_table.waiting) + len(request_table.awaiting) - len(holding_blocks),
        waiting_tokens=request_table.waiting_tokens,
        running_requests=len(request_table.running) + len(holding_blocks) - len(granted),
        free_blocks=pool.free_blocks,
        active_blocks=pool.holds.num_held - sum(granted),
        cached_blocks=pool.cached_blocks,
        granted_blocks=sum(granted),
        total_blocks=pool.num_blocks,
        open_grants=len(granted),
    )
