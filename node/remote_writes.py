"""New blocks are written to the store that all nodes share, a group at a time, from where they lie; they are held until
they were copied from there.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.block_pool import chain_of
from engine.engine import Engine
from kv_transfer.tiers.groups import Group, in_chain
from kv_transfer.tiers.remote import RemoteTier
from node.gathering import TURN, Gathering
from node.service import Base


class RemoteWrites(Gathering):
    """On the engine thread. A group is written when its last block is here; what the store has no room for, or cannot
    take now, is not tried again."""

    def __init__(self, base: Base, tier: RemoteTier, transfers: Iterator[int]) -> None:
        super().__init__(base, tier, base.metrics.tiers.blocks["remote"], transfers)
        self._tier = tier

    def _gather(self, engine: Engine) -> None:
        turn = TURN
        while self._fresh and turn > 0:
            last, _ = self._fresh.popitem()
            chain = chain_of(engine.pool, last)
            turn -= len(chain) + 1
            new = {each for each, _ in chain if each in self._fresh} | {last}
            for each in new:
                self._fresh.pop(each, None)
            for group in in_chain(self._tier.folder, [each for each, _ in chain]):
                if group.hashes[-1] in new:
                    self._write(engine, chain[: group.end], group)

    def _write(self, engine: Engine, chain: list[tuple[bytes, int]], group: Group) -> None:
        """The end of a chain, which is held as a whole, so that a block never leaves before those behind it."""
        if self._tier.has(group):
            return
        ways, memory, transfer = self._ways, self._base.dock.path.memory, next(self._transfers)
        blocks = [memory.block(block_id) for _, block_id in chain[group.start :]]

        def copied() -> None:
            self._base.engine.submit(lambda engine: engine.copies.returned(transfer))

        def done(there: bool) -> None:
            ways["written" if there else "lost"].inc(len(blocks))

        engine.copies.give(transfer, [block_id for _, block_id in chain])
        if not self._tier.write(group, blocks, copied, done):
            engine.copies.returned(transfer)
            ways["lost"].inc(len(blocks))
