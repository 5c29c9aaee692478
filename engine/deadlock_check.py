"""Deadlock check: raises StepFailed if prompts that are being sent hold all blocks and each of them lacks one."""

from __future__ import annotations

from collections.abc import Hashable

from kvferry.engine.block_assignment import BlockAssignment
from kvferry.engine.request import held_up
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.errors import StepFailed


def require_progress(request_table: RequestTable, blocks: BlockAssignment) -> None:
    """Raise StepFailed if prompts that are being sent hold all blocks, and each of them lacks one.

    Prompts that share pages would release none if they continued. Called when nothing can run."""
    running, pool = request_table.running, blocks.pool
    own: set[Hashable] = {r.key for r in running} | {("ship", r.transfer) for r in running}
    if (
        any(not held_up(r) and blocks.missing(r) > pool.available for r in running)
        and all(r.transfer is not None for r in running)
        and all(owner in own for _, owner in pool.holds.owners())
    ):
        raise StepFailed("prompts that are being sent hold all blocks, and each lacks one")
