"""Keeps media embeddings of an encode node in its own tiers (host memory, disk), and reads them back into the pool.

An embedding is a row per token; the rows of one image or audio are a run of blocks. Tiers hold a run under its hashes,
as they hold blocks of K and V, so a node that restarts finds what it encoded. All methods run on the engine thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.protocol.errors import GrantRefused, KvferryError
from kvferry.worker.local_writes import LocalWrites
from kvferry.worker.service import NodeParts
from kvferry.worker.tier_writer import later

MIN_S = 0.5
"""Shortest time limit of a read, in seconds."""
Ended = Callable[[], None]
"""Called on the engine thread once a run is in the pool, or will not be read."""


class EmbeddingTiers:
    """Runs of embedding blocks in a node's own tiers. writers: one for each tier, the fastest first."""

    def __init__(self, base: NodeParts, writers: Sequence[LocalWrites]) -> None:
        self._base, self._writers = base, writers
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, list[Ended]] = {}
        self._late: set[str] = set()

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Write a run that is in the pool to all tiers."""
        for writer in self._writers:
            writer.keep(hashes)

    def read(self, engine: Engine, hashes: Sequence[bytes], encode_s: float, ended: Ended) -> None:
        """Read a run into the pool if a tier has all of it and is faster than the encoder; then call `ended`.

        encode_s: time to encode the medium, in seconds; 0: unknown. Calls for the same run share a read."""
        if (waiting := self._waiting.get(hashes[0])) is not None:
            waiting.append(ended)
            return
        for tier in (writer.tier for writer in self._writers):
            missing = hashes[len(engine.pool.match(hashes)) :]
            seconds = tier.seconds(len(missing))
            if missing and tier.run(missing) == len(missing) and tier.name not in self._late:
                if encode_s and seconds >= encode_s:
                    continue
                self._waiting[hashes[0]] = [ended]
                self._start(engine, tier, hashes, max(MIN_S, encode_s))
                return
        ended()

    def _start(self, engine: Engine, tier: LocalTier[Any], hashes: Sequence[bytes], limit_s: float) -> None:
        grant, began = ("embeddings", next(self._numbers)), time.monotonic()
        try:
            here, block_ids = engine.copies.reserve(grant, hashes, len(hashes))
        except GrantRefused:
            self._finish(tier, hashes, "refused")
            return
        over = [False]

        def done(engine: Engine, error: KvferryError | None) -> None:
            self._read_done(engine, tier, grant, hashes[here:], time.monotonic() - began, error)
            if not over[0]:
                over[0] = True
                self._finish(tier, hashes, "done" if error is None else "failed")

        def overdue(engine: Engine) -> None:
            if not over[0]:  # its blocks stay held until the read ends
                over[0] = True
                self._late.add(tier.name)
                self._finish(tier, hashes, "late")

        blocks, submit = [*map(self._base.tiers.block, block_ids)], self._base.engine.submit
        if not tier.read(hashes[here:], blocks, lambda error: submit(lambda engine: done(engine, error))):
            engine.copies.quiet(grant)
            self._finish(tier, hashes, "refused")
            return
        later(self._base, limit_s, overdue)

    def _read_done(
        self,
        engine: Engine,
        tier: LocalTier[Any],
        grant: tuple[str, int],
        hashes: Sequence[bytes],
        seconds: float,
        error: KvferryError | None,
    ) -> None:
        """Register the blocks that were read, unless one of them was retracted as wrong meanwhile."""
        self._late.discard(tier.name)
        if error is not None or any(engine.pool.miss_reasons.reason(each) == "retracted" for each in hashes):
            engine.copies.quiet(grant)
            return
        self._base.metrics.tiers.blocks[tier.name]["read"].inc(len(hashes))
        self._base.metrics.tiers.seconds[tier.name].inc(seconds)
        engine.copies.land(grant, tiers=False)

    def _finish(self, tier: LocalTier[Any], hashes: Sequence[bytes], outcome: str) -> None:
        """Count a read's outcome, and go on with everything that waited for it."""
        self._base.metrics.tiers.reads[tier.name][outcome].inc()
        for ended in self._waiting.pop(hashes[0]):
            ended()
