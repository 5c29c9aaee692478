"""Base of the writers of new blocks to tiers: collects the pool's new blocks and calls the writer every 0.2 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from prometheus_client import Counter

from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged
from kvferry.worker.service import NodeParts

GATHER_S = 0.2
"""Seconds between two checks for new blocks."""
MAX_HELD = 4096
"""Maximum number of blocks held or visited in one check, so that the engine is not delayed for long."""


def later(base: NodeParts, seconds: float, call: Callable[[Engine], None]) -> None:
    """Run a call on the engine thread after `seconds`."""

    def wait() -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: base.engine.submit(call))

    base.call_soon(wait)


class Drops(Protocol):
    """Tier that can drop blocks found to be wrong."""

    def drop(self, hashes: Collection[bytes]) -> None:
        """Drop the blocks of these hashes."""
        ...


class TierWriter:
    """Collector of new blocks for one tier, on the engine thread; subclasses write them.

    name: the tier's label in metrics. transfers: source of transfer ids, unique among all holds."""

    def __init__(self, base: NodeParts, tier: Drops, name: str, transfers: Iterator[int]) -> None:
        self._base, self._drops, self._name, self._transfers = base, tier, name, transfers
        self._fresh: dict[bytes, float] = {}
        self._waits = False

    @property
    def _counters(self) -> dict[str, Counter]:
        return self._base.metrics.tiers.blocks[self._name]

    def take(self, event: BlocksChanged) -> None:
        """Queue new blocks for writing, and drop retracted ones from the tier."""
        pool = self._base.parts.engine.pool
        miss_reasons, untiered = pool.miss_reasons, pool.changes.untiered
        wrong = [each for each in event.removed if miss_reasons.reason(each) == "retracted"]
        if wrong:
            self._drops.drop(wrong)
        lost = [each for each in event.removed if self._fresh.pop(each, None) is not None]
        self._counters["lost"].inc(len(lost))
        new = [*(each for each in event.stored if each not in untiered), *event.kept]
        self._fresh.update(dict.fromkeys(new, time.monotonic()))
        self._schedule()

    def _schedule(self) -> None:
        if self._fresh and not self._waits:
            self._waits = True
            later(self._base, GATHER_S, self._write_new)

    def _write_new(self, engine: Engine) -> None:
        self._waits = False
        self._gather(engine)
        self._schedule()

    def _gather(self, engine: Engine) -> None:
        """Write the queued blocks that are worth it, newest first.

        The blocks before it in the chain are written with it."""
        raise NotImplementedError
