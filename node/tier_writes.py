"""New blocks are written to a slower memory of the node as soon as they are computed, or have arrived, from where they
lie; they are held meanwhile. So what the pool evicts, or a restart loses, is there already.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from engine.block_pool import chain_of
from engine.engine import Engine
from engine.events import BlocksChanged
from kv_transfer.tiers.disk import DiskTier
from node.service import Base

GATHER_S = 0.2
"""Between two looks for new blocks."""
ENOUGH, PATIENCE_S = 8, 5.0
"""New blocks of a chain that are written at once; fewer may become more for so long, as those of a stream do."""
HELD = 2
"""One block of so many may be held to be written, also where the disk hangs."""


def later(base: Base, seconds: float, call: Callable[[Engine], None]) -> None:
    """On the engine thread, after so many seconds."""

    def wait() -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: base.engine.submit(call))

    base.call_soon(wait)


class TierWrites:
    """On the engine thread."""

    def __init__(self, base: Base, tier: DiskTier) -> None:
        self._base, self._tier = base, tier
        self._transfers = itertools.count(-1, -1)
        self._held = 0
        self._fresh: dict[bytes, float] = {}
        self._gathering = False

    def take(self, event: BlocksChanged) -> None:
        """New blocks are to be written, wrong ones not to be found."""
        absences = self._base.parts.engine.pool.absences
        wrong = [each for each in event.removed if absences.reason(each) == "retracted"]
        if wrong:
            self._tier.drop(wrong)
        self._fresh.update(dict.fromkeys(event.stored, time.monotonic()))
        self._look_again()

    def _look_again(self) -> None:
        if self._fresh and not self._gathering:
            self._gathering = True
            later(self._base, GATHER_S, self._gather)

    def _gather(self, engine: Engine) -> None:
        """Whole chains are held, so that a block never leaves before those behind it."""
        self._gathering = False
        fresh, self._fresh = self._fresh, {}
        for block_hash in list(reversed(fresh)):
            if block_hash not in fresh:
                continue
            chain = chain_of(engine.pool, block_hash)
            new = [index for index, (each, _) in enumerate(chain) if each in fresh and each not in self._tier]
            since = [fresh.pop(each) for each, _ in chain if each in fresh]
            if new and len(new) < ENOUGH and min(since) > time.monotonic() - PATIENCE_S:
                self._fresh.update(dict.fromkeys((chain[index][0] for index in new), min(since)))
            elif new:
                self._write(engine, chain, new)
        self._look_again()

    def _write(self, engine: Engine, chain: list[tuple[bytes, int]], new: list[int]) -> None:
        """Those of the chain with these indices."""
        transfer, ways = next(self._transfers), self._base.metrics.tiers.blocks
        if self._held + len(chain) > engine.pool.num_blocks // HELD:
            ways["lost"].inc(len(new))
            return

        def done(written: int) -> None:
            ways["written"].inc(written)
            ways["lost"].inc(len(new) - written)
            self._base.engine.submit(lambda engine: self._returned(engine, transfer, len(chain)))

        self._held += len(chain)
        engine.copies.give(transfer, [block_id for _, block_id in chain])
        blocks = [self._base.dock.path.memory.block(chain[index][1]) for index in new]
        parent = chain[new[0] - 1][0] if new[0] else b""
        if not self._tier.write([chain[index][0] for index in new], parent, blocks, done):
            done(0)

    def _returned(self, engine: Engine, transfer: int, blocks: int) -> None:
        self._held -= blocks
        engine.copies.returned(transfer)
