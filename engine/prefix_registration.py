"""Registers a request's full blocks in the prefix cache by their hashes, so that other requests can reuse them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request


def make_findable(pool: BlockPool, request: Request, until: int, holders: Sequence[tuple[Hashable, str]]) -> None:
    """Make the request's blocks before index `until` findable: full, hashed, and held by (owner, reason).

    A block is replaced by one of equal content that is findable already."""
    before = pool.registered_total
    for i in range(request.registered, until):
        parent, own = request.block_ids[i - 1] if i else None, request.block_ids[i]
        request.block_ids[i] = pool.register(holders, own, request.hashes[i], parent)
        request.replacements += request.block_ids[i] != own
        request.registered = i + 1
    request.written += pool.registered_total - before
    if pool.contents is not None and until and pool.match(request.hashes[until - 1 : until]):
        pool.contents.note(request.job, request.token_ids, request.hashes[:until], request.block_size)
