"""Writer of a node's new blocks to the shared object store, one group at a time; blocks are held until copied."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engine.block_pool import chain_of
from kvferry.engine.engine import Engine
from kvferry.kv_transfer.tiers import object_groups as sizes
from kvferry.kv_transfer.tiers.object_groups import Group, in_chain
from kvferry.kv_transfer.tiers.remote import RemoteTier
from kvferry.worker.service import NodeParts
from kvferry.worker.tier_writer import MAX_HELD, TierWriter


class RemoteWrites(TierWriter):
    """Writer of new blocks to the shared object store, on the engine thread.

    A group is written once its last block is in the pool. A group that the store has no space for, or cannot take now,
    is not retried."""

    def __init__(self, base: NodeParts, tier: RemoteTier, transfers: Iterator[int]) -> None:
        super().__init__(base, tier, "remote", transfers)
        self._tier = tier

    def _gather(self, engine: Engine) -> None:
        budget = MAX_HELD
        while self._fresh and budget > 0:
            last, _ = self._fresh.popitem()
            chain = chain_of(engine.pool, last)
            budget -= len(chain) + 1
            new = {each for each, _ in chain if each in self._fresh} | {last}
            for each in new:
                self._fresh.pop(each, None)
            groups = in_chain(self._tier.folder, [each for each, _ in chain])
            if wanted := [group for group in groups if group.hashes[-1] in new and not self._tier.has(group)]:
                self._write(engine, chain[: wanted[-1].end], wanted)

    def _write(self, engine: Engine, chain: list[tuple[bytes, int]], groups: list[Group]) -> None:
        """Write groups of one chain.

        The whole chain is held, so that no block is evicted before the blocks behind it."""
        transfer, left = next(self._transfers), len(groups)

        def copied(engine: Engine) -> None:
            nonlocal left
            left -= 1
            if not left:
                engine.copies.returned(transfer)

        engine.copies.hold_chain(transfer, [block_id for _, block_id in chain])
        for group in groups:
            blocks = [self._base.tiers.block(block_id) for _, block_id in chain[group.start : group.end]]
            if not self._tier.write(group, blocks, lambda: self._base.engine.submit(copied), self._count):
                self._count(False)
                copied(engine)

    def _count(self, there: bool) -> None:
        self._counters["written" if there else "lost"].inc(sizes.GROUP)
