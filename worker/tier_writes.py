"""Writes of new blocks to a slower tier as soon as they are computed or have arrived.

Blocks are held meanwhile, so what the pool evicts or a restart loses is already there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvferry.engine.block_pool import chain_of
from kvferry.engine.engine import Engine
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.worker.service import Base
from kvferry.worker.write_batches import TURN, WriteBatches

ENOUGH, PATIENCE_S = 8, 5.0
"""New blocks of a chain that are written at once; fewer may become more for so long, as those of a stream do."""
HELD = 2
"""One block of so many may be held to be written, for all tiers of the node together, also where a disk hangs."""


class TierWrites(WriteBatches):
    """On the engine thread.

    What is written begins where the tier ends of a chain, so that this has all that stands before a block that it has;
    what could not be written is tried again with what comes behind it."""

    def __init__(self, base: Base, tier: LocalTier[Any], transfers: Iterator[int]) -> None:
        super().__init__(base, tier, tier.name, transfers)
        self._tier, self._held = tier, 0

    def _gather(self, engine: Engine) -> None:
        fresh, self._fresh = self._fresh, {}
        turn = TURN
        for block_hash in list(reversed(fresh)):
            if block_hash not in fresh:
                continue
            if turn <= 0:
                break
            new = [each for each, _ in chain_of(engine.pool, block_hash, self._tier)]
            turn -= len(new)
            since = [fresh.pop(each) for each in (*new, block_hash) if each in fresh]
            if new and len(new) < ENOUGH and min(since) > time.monotonic() - PATIENCE_S:
                self._fresh.update(dict.fromkeys(new, min(since)))
            elif new:
                held, left = self._write(engine, new)
                turn -= held
                if left is None:
                    self._ways["lost"].inc(len(since))
                elif left:
                    fresh.update(dict.fromkeys(left, min(since)))
                    break
        self._fresh = {**fresh, **self._fresh}

    def _write(self, engine: Engine, new: list[bytes]) -> tuple[int, list[bytes] | None]:
        """The end of a chain, which is held as a whole, so that a block never leaves before those behind it: how many
        blocks that takes, and which of the new ones are to be tried later; None: their chain is too long."""
        ways, whole = self._ways, chain_of(engine.pool, new[-1])
        most, before = engine.pool.num_blocks // HELD // len(self._base.tiers.local), len(whole) - len(new)
        chain = whole[: most - self._held]
        if len(chain) <= before:
            return 0, new if self._held else None
        part = chain[before:]
        parent = chain[before - 1][0] if before else b""
        blocks, transfer = [self._base.tiers.block(each) for _, each in part], next(self._transfers)

        def done(written: int) -> None:
            ways["written"].inc(written)
            ways["lost"].inc(len(part) - written)
            self._base.engine.submit(lambda engine: self._returned(engine, transfer, len(chain)))

        engine.copies.give(transfer, [block_id for _, block_id in chain])
        if not self._tier.write([each for each, _ in part], parent, blocks, done):
            engine.copies.returned(transfer)
            return 0, new
        self._held += len(chain)
        return len(chain), new[len(part) :]

    def _returned(self, engine: Engine, transfer: int, blocks: int) -> None:
        self._held -= blocks
        engine.copies.returned(transfer)
