"""Writer of a node's new blocks to a local tier, as soon as they are computed or received.

Blocks are held until they are written. Blocks that the pool later evicts, or a restart loses, are thus in the tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.engine.block_pool import chain_of
from kvferry.engine.engine import Engine
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.worker.service import NodeParts
from kvferry.worker.tier_writer import MAX_HELD, TierWriter

ENOUGH, GATHERING_S = 8, 5.0
"""Number of new blocks of a chain that are written at once, and seconds for which fewer blocks wait for more.

A stream's blocks arrive one by one."""
HELD = 2
"""Divisor of the pool: one block in HELD may be held for writes, over all tiers, even if a disk hangs."""


class LocalWrites(TierWriter):
    """Writer of new blocks to one local tier, on the engine thread. tier: to which it writes.

    A write starts where the tier's copy of the chain ends, so the tier always has the blocks before each of its blocks.
    Blocks that could not be written are retried with the blocks behind them."""

    def __init__(self, base: NodeParts, tier: LocalTier[Any], transfers: Iterator[int]) -> None:
        super().__init__(base, tier, tier.name, transfers)
        self.tier, self._held = tier, 0

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Write these blocks of the pool at the next check, also where the pool does not tell tiers of them."""
        self._fresh.update(dict.fromkeys(hashes, time.monotonic() - GATHERING_S))
        self._schedule()

    def _gather(self, engine: Engine) -> None:
        fresh, self._fresh = self._fresh, {}
        budget = MAX_HELD
        for block_hash in list(reversed(fresh)):
            if block_hash not in fresh:
                continue
            if budget <= 0:
                break
            new = [each for each, _ in chain_of(engine.pool, block_hash, self.tier)]
            budget -= len(new)
            since = [fresh.pop(each) for each in (*new, block_hash) if each in fresh]
            if new and len(new) < ENOUGH and min(since) > time.monotonic() - GATHERING_S:
                self._fresh.update(dict.fromkeys(new, min(since)))
            elif new:
                held, left = self._write(engine, new)
                budget -= held
                if left is None:
                    self._counters["lost"].inc(len(since))
                elif left:
                    fresh.update(dict.fromkeys(left, min(since)))
                    break
        self._fresh = {**fresh, **self._fresh}

    def _write(self, engine: Engine, new: list[bytes]) -> tuple[int, list[bytes] | None]:
        """Write the end of a chain; return how many blocks are held, and which new ones to retry later.

        The whole chain is held, so that no block is evicted before the blocks behind it. The second value is None if
        the chain is too long to be held."""
        counters, whole = self._counters, chain_of(engine.pool, new[-1])
        most, before = engine.pool.num_blocks // HELD // len(self._base.tiers.local), len(whole) - len(new)
        chain = whole[: most - self._held]
        if len(chain) <= before:
            return 0, new if self._held else None
        part = chain[before:]
        parent = chain[before - 1][0] if before else b""
        blocks, transfer = [self._base.tiers.block(each) for _, each in part], next(self._transfers)

        def done(written: int) -> None:
            counters["written"].inc(written)
            counters["lost"].inc(len(part) - written)
            self._base.engine.submit(lambda engine: self._returned(engine, transfer, len(chain)))

        engine.copies.hold_chain(transfer, [block_id for _, block_id in chain])
        if not self.tier.write([each for each, _ in part], parent, blocks, done):
            engine.copies.returned(transfer)
            return 0, new
        self._held += len(chain)
        return len(chain), new[len(part) :]

    def _returned(self, engine: Engine, transfer: int, blocks: int) -> None:
        self._held -= blocks
        engine.copies.returned(transfer)
