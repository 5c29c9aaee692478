"""Blocks of prompts that a slower memory of this node has: a request is AWAITING them where reading takes less time
than computing, and computes what does not come in time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.engine import Engine
from engine.events import BlocksChanged, Event, Failed
from engine.request import Key, Request, key_of
from engine.roster import expect
from engine.states import Awaits
from kv_transfer.tiers.disk import DiskTier, open_disk
from node.assembly import Assembled
from node.fetches import Fetches
from node.service import Base
from node.tier_writes import TierWrites, later
from protocol.errors import ConfigError, GrantRefused, KvferryError
from protocol.messages import Job
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")

GIB = 1024**3
PIECE = 256
"""Blocks of one read."""
TURNS = 4
"""Reads that a request awaits beyond those that its blocks are worth: what came may be evicted at once."""
LEAST_S, SLOWNESS = 1.0, 2.0
"""A read has so many seconds, or so many times as long as computing would take, if that is more."""


def open_tier(settings: WorkerSettings, parts: Assembled) -> DiskTier | None:
    """As the settings want it. Raises ConfigError. It may take as long as reading the headers of all files."""
    if not settings.kv_disk_path:
        return None
    if not settings.enable_prefix_caching or parts.engine.config.limits.whole:
        raise ConfigError("nothing is cached here that could be kept on disk", param="kv_disk_path")
    if parts.kv.device.type != "cpu":
        raise ConfigError("kv_disk_path keeps blocks of pools on a CPU only, as yet", param="kv_disk_path")
    size, began = int(settings.kv_disk_gib * GIB), time.monotonic()
    block_bytes = parts.layout.block_bytes
    tier = open_disk(settings.kv_disk_path, settings.role, size, parts.fingerprint, block_bytes)
    found, took = len(tier.hashes()), time.monotonic() - began
    log.info("%d blocks (%.2f GiB) found in %s in %.1f s", found, tier.used / GIB, tier.directory, took)
    return tier


@dataclass(slots=True, eq=False)
class Reading:
    """A request that awaits blocks, after so many reads."""

    request: Request
    job: Job
    turns: int = 0


class Tiers:
    """Between a node's service and its engine. On the engine thread, but for what says otherwise."""

    def __init__(self, base: Base, fetches: Fetches) -> None:
        self._base, self._fetches, self._tier = base, fetches, base.tier
        self._numbers = itertools.count(1)
        self._waiting: dict[Key, Reading] = {}
        self._coming: dict[bytes, tuple[Hashable, list[Reading]]] = {}
        self._late: set[Hashable] = set()
        self._writes = TierWrites(base, base.tier) if base.tier is not None else None

    def add(self, engine: Engine, job: Job, **how: Any) -> None:
        """`Fetches.add`, once what is on disk of its prompt has been read."""
        if self._tier is None or not self._tier.used:
            self._fetches.add(engine, job, **how)
            return
        awaits = (Awaits.TIER,) if job.holder is None else (Awaits.TIER, Awaits.FETCH)
        engine.add(job, awaits=awaits, **how)
        request = engine.roster.find(key_of(job))
        if request is not None and Awaits.TIER in request.awaits and request.key not in self._waiting:
            self._waiting[request.key] = reading = Reading(request, job)
            self._next(engine, reading)

    def take(self, events: Sequence[Event]) -> None:
        """Who ended awaits nothing; new blocks are written."""
        for event in events:
            if isinstance(event, Failed):
                self._waiting.pop(event.key, None)
            elif isinstance(event, BlocksChanged) and self._writes is not None:
                self._writes.take(event)

    def _next(self, engine: Engine, reading: Reading) -> None:
        """Read what is still missing, await it with others, or let the request go on."""
        request = reading.request
        assert self._tier is not None
        if self._gone(engine, reading):
            return
        hashes = request.reusable_hashes
        here = len(engine.pool.match(hashes))
        count = self._tier.run(hashes[here : here + PIECE])
        reading.turns += 1
        if not self._worth(count, request.block_size) or reading.turns > TURNS + len(hashes) // PIECE:
            self._go_on(engine, reading)
        elif coming := self._coming.get(hashes[here]):
            coming[1].append(reading)
        else:
            self._read(engine, reading, hashes[: here + count], hashes[here])

    def _worth(self, blocks: int, block_size: int) -> bool:
        assert self._tier is not None
        return bool(blocks) and not self._late and self._tier.seconds(blocks) < self._computed_s(blocks * block_size)

    def _read(self, engine: Engine, reading: Reading, hashes: Sequence[bytes], missing: bytes) -> None:
        grant: Hashable = ("tier", next(self._numbers))
        tier, memory = self._tier, self._base.dock.path.memory
        assert tier is not None
        try:
            here, block_ids = engine.copies.reserve(grant, hashes, len(hashes))
        except GrantRefused:
            self._base.metrics.tiers.reads["refused"].inc()
            self._go_on(engine, reading)
            return
        self._coming[missing] = (grant, [reading])
        began, done = time.monotonic(), self._base.engine.submit

        def came(error: KvferryError | None) -> None:
            done(lambda engine: self._came(engine, grant, missing, hashes[here:], time.monotonic() - began, error))

        if not tier.read(hashes[here:], [memory.block(each) for each in block_ids], came):
            self._ended(engine, grant, missing, "refused")
            return
        patience_s = max(LEAST_S, SLOWNESS * self._computed_s(len(block_ids) * reading.request.block_size))
        later(self._base, patience_s, lambda engine: self._overdue(engine, grant, missing))

    def _came(
        self,
        engine: Engine,
        grant: Hashable,
        missing: bytes,
        hashes: Sequence[bytes],
        seconds: float,
        error: KvferryError | None,
    ) -> None:
        """What was said to be wrong meanwhile is not taken for right because it is as it was written."""
        metrics, reason = self._base.metrics.tiers, engine.pool.absences.reason
        self._late.discard(grant)
        if error is not None or any(reason(each) == "retracted" for each in hashes):
            self._ended(engine, grant, missing, "failed")
            return
        metrics.blocks["read"].inc(len(hashes))
        metrics.seconds.inc(seconds)
        engine.copies.land(grant)
        engine.stepper.report_blocks()
        self._told(engine, grant, missing, "done", self._next)

    def _ended(self, engine: Engine, grant: Hashable, missing: bytes, outcome: str) -> None:
        engine.copies.quiet(grant)
        self._told(engine, grant, missing, outcome, self._go_on)

    def _overdue(self, engine: Engine, grant: Hashable, missing: bytes) -> None:
        """The disk is slow, or hangs: nothing is read until it has answered. Its blocks stay held until then."""
        if self._coming.get(missing, (None, []))[0] == grant:
            self._late.add(grant)
            self._told(engine, grant, missing, "late", self._go_on)

    def _told(
        self, engine: Engine, grant: Hashable, missing: bytes, outcome: str, go: Callable[[Engine, Reading], None]
    ) -> None:
        """The read has ended so, for all that await it; nothing if they know already."""
        if self._coming.get(missing, (None, []))[0] == grant:
            _, waiting = self._coming.pop(missing)
            self._base.metrics.tiers.reads[outcome].inc()
            for reading in waiting:
                go(engine, reading)

    def _gone(self, engine: Engine, reading: Reading) -> bool:
        key = reading.request.key
        return self._waiting.get(key) is not reading or engine.roster.find(key) is not reading.request

    def _go_on(self, engine: Engine, reading: Reading) -> None:
        """What has not come is fetched from a peer, or computed."""
        request = reading.request
        if self._gone(engine, reading):
            return
        del self._waiting[request.key]
        if reading.turns > 1:
            found = len(engine.pool.match(request.reusable_hashes)) * request.block_size
            expect(engine.roster, request, len(request.token_ids) - found)
        self._fetches.begin(engine, reading.job)
        engine.resume(request.key, Awaits.TIER)

    def _computed_s(self, tokens: int) -> float:
        return tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0)
