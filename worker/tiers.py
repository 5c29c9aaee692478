"""Prefix reads from slower tiers.

A request is AWAITING them where reading takes less time than computing, and computes what does not come in time. The
node's own tiers come first, host memory before disk, then the shared store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged, Event, Failed
from kvferry.engine.request import Key, Request, key_of
from kvferry.engine.request_states import Awaits
from kvferry.engine.request_table import expect
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.protocol.errors import GrantRefused, KvferryError
from kvferry.protocol.messages import Job
from kvferry.worker.fetch_client import PrefixFetcher
from kvferry.worker.remote_writes import RemoteWrites
from kvferry.worker.service import Base
from kvferry.worker.tier_writes import TierWrites
from kvferry.worker.write_batches import WriteBatches, later

PIECE = 256
"""Blocks of one read."""
TURNS = 4
"""Reads that a request awaits beyond those that its blocks are worth: what came may be evicted at once."""
PATIENT = 8
"""The remote tier may take so manyth part of the time of computing to say what it has."""
LEAST_S, SLOWNESS = 1.0, 2.0
"""A read has so many seconds, or so many times as long as computing would take, if that is more."""


@dataclass(slots=True, eq=False)
class Reading:
    """A request that awaits blocks, after so many reads."""

    request: Request
    job: Job
    turns: int = 0


Done = Callable[[KvferryError | None], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A tier as it is read from.

    seconds: that so many blocks take; read: a chain's blocks from one of them to its end, into these (False: not now).
    """

    name: str
    seconds: Callable[[int], float]
    read: Callable[[Sequence[bytes], int, Sequence[Any], Done], bool]


def _source(tier: LocalTier[Any]) -> Source:
    return Source(tier.name, tier.seconds, lambda hashes, at, into, done: tier.read(hashes[at:], into, done))


@dataclass(frozen=True, slots=True)
class Grant:
    """Reservation of pool blocks that a source is to fill."""

    source: Source
    number: int


class Tiers:
    """Between a node's service and its engine. On the engine thread, but for what says otherwise."""

    def __init__(self, base: Base, fetches: PrefixFetcher) -> None:
        self._base, self._fetches = base, fetches
        self._remote = base.tiers.remote
        self._numbers, transfers = itertools.count(1), itertools.count(-1, -1)
        self._waiting: dict[Key, Reading] = {}
        self._coming: dict[bytes, tuple[Grant, list[Reading]]] = {}
        self._late: set[Grant] = set()
        self._writes: list[WriteBatches] = []
        self._local = [(tier, _source(tier)) for tier in base.tiers.local]
        self._writes += [TierWrites(base, tier, transfers) for tier in base.tiers.local]
        if (remote := self._remote) is not None:
            self._writes.append(RemoteWrites(base, remote, transfers))
            self._of_remote = Source("remote", remote.seconds, remote.read)

    def add(self, engine: Engine, job: Job, **how: Any) -> None:
        """`PrefixFetcher.add`, once what slower memories have of its prompt has been read."""
        if not any(tier.used for tier, _ in self._local) and (self._remote is None or self._remote.out):
            self._fetches.add(engine, job, **how)
            return
        awaits = (Awaits.TIER,) if job.holder is None else (Awaits.TIER, Awaits.FETCH)
        engine.add(job, awaits=awaits, **how)
        request = engine.request_table.find(key_of(job))
        if request is not None and Awaits.TIER in request.awaits and request.key not in self._waiting:
            self._waiting[request.key] = reading = Reading(request, job)
            self._next(engine, reading)

    def take(self, events: Sequence[Event]) -> None:
        """Stop reads for requests that ended, and write new blocks."""
        for event in events:
            if isinstance(event, Failed):
                self._waiting.pop(event.key, None)
            elif isinstance(event, BlocksChanged):
                for writes in self._writes:
                    writes.take(event)

    def _next(self, engine: Engine, reading: Reading) -> None:
        """Read what is still missing, await it with others, or let the request go on."""
        if self._gone(engine, reading):
            return
        hashes = reading.request.reusable_hashes
        here = len(engine.pool.match(hashes))
        reading.turns += 1
        if here == len(hashes) or reading.turns > TURNS + len(hashes) // PIECE:
            self._go_on(engine, reading)
        elif coming := self._coming.get(hashes[here]):
            coming[1].append(reading)
        elif found := self._here(reading.request, here):
            source, count = found
            self._read(engine, reading, source, hashes[: here + count], hashes[here])
        elif not self._looked_for(reading, here):
            self._go_on(engine, reading)

    def _here(self, request: Request, first: int) -> tuple[Source, int] | None:
        """Which tier blocks from this one on are worth a read from, and how many: the quickest that has the first."""
        wanted = request.reusable_hashes[first : first + PIECE]
        for tier, source in self._local:
            if (count := tier.run(wanted)) and self._worth(source, count, request):
                return source, count
        return None

    def _looked_for(self, reading: Reading, here: int) -> bool:
        """Return whether the remote tier is asked what it has, which is told to `_found`: where all that it could have
        is worth a read, and the question next to nothing of that. A peer's pool is quicker."""
        request, tier = reading.request, self._remote
        if tier is None or reading.job.holder is not None:
            return False
        hashes = request.reusable_hashes
        most = len(hashes) - here
        if not self._worth(self._of_remote, most, request):
            return False
        patience_s = min(LEAST_S, self._computed_s(most * request.block_size) / PATIENT)
        done = self._base.engine.submit
        return tier.look(
            hashes, here, patience_s, lambda count: done(lambda engine: self._found(engine, reading, here, count))
        )

    def _found(self, engine: Engine, reading: Reading, first: int, count: int) -> None:
        """So many blocks of its chain are there, from this one on; the pool may have lost what it had before it."""
        request = reading.request
        if self._gone(engine, reading):
            return
        hashes = request.reusable_hashes
        here = len(engine.pool.match(hashes))
        upto = first + count if count else 0
        if here < upto and (coming := self._coming.get(hashes[here])):
            coming[1].append(reading)
        elif here < upto and self._worth(self._of_remote, upto - here, request):
            self._read(engine, reading, self._of_remote, hashes[:upto], hashes[here])
        else:
            self._go_on(engine, reading)

    def _worth(self, source: Source, blocks: int, request: Request) -> bool:
        if not blocks or any(each.source is source for each in self._late):
            return False
        return source.seconds(blocks) < self._computed_s(blocks * request.block_size)

    def _read(self, engine: Engine, reading: Reading, source: Source, hashes: Sequence[bytes], missing: bytes) -> None:
        grant = Grant(source, next(self._numbers))
        try:
            here, block_ids = engine.copies.reserve(grant, hashes, len(hashes))
        except GrantRefused:
            self._base.metrics.tiers.reads[source.name]["refused"].inc()
            self._go_on(engine, reading)
            return
        self._coming[missing] = (grant, [reading])
        began, done = time.monotonic(), self._base.engine.submit

        def came(error: KvferryError | None) -> None:
            done(lambda engine: self._came(engine, grant, missing, hashes[here:], time.monotonic() - began, error))

        if not source.read(hashes, here, [*map(self._base.tiers.block, block_ids)], came):
            self._ended(engine, grant, missing, "refused")
            return
        patience_s = max(LEAST_S, SLOWNESS * self._computed_s(len(block_ids) * reading.request.block_size))
        later(self._base, patience_s, lambda engine: self._overdue(engine, grant, missing))

    def _came(
        self,
        engine: Engine,
        grant: Grant,
        missing: bytes,
        hashes: Sequence[bytes],
        seconds: float,
        error: KvferryError | None,
    ) -> None:
        """What was said to be wrong meanwhile is not taken for right because it is as it was written."""
        metrics, reason, name = self._base.metrics.tiers, engine.pool.miss_reasons.reason, grant.source.name
        self._late.discard(grant)
        if error is not None or any(reason(each) == "retracted" for each in hashes):
            self._ended(engine, grant, missing, "failed")
            return
        metrics.blocks[name]["read"].inc(len(hashes))
        metrics.seconds[name].inc(seconds)
        engine.copies.land(grant)
        self._told(engine, grant, missing, "done", self._next)

    def _ended(self, engine: Engine, grant: Grant, missing: bytes, outcome: str) -> None:
        engine.copies.quiet(grant)
        self._told(engine, grant, missing, outcome, self._go_on)

    def _overdue(self, engine: Engine, grant: Grant, missing: bytes) -> None:
        """The tier is slow, or hangs: it is not read until it has answered. Its blocks stay held until then."""
        if self._coming.get(missing, (None, []))[0] == grant:
            self._late.add(grant)
            self._told(engine, grant, missing, "late", self._go_on)

    def _told(
        self, engine: Engine, grant: Grant, missing: bytes, outcome: str, go: Callable[[Engine, Reading], None]
    ) -> None:
        """The read has ended so, for all that await it; nothing if they know already."""
        if self._coming.get(missing, (None, []))[0] == grant:
            _, waiting = self._coming.pop(missing)
            self._base.metrics.tiers.reads[grant.source.name][outcome].inc()
            for reading in waiting:
                go(engine, reading)

    def _gone(self, engine: Engine, reading: Reading) -> bool:
        key = reading.request.key
        return self._waiting.get(key) is not reading or engine.request_table.find(key) is not reading.request

    def _go_on(self, engine: Engine, reading: Reading) -> None:
        """What has not come is fetched from a peer, or computed."""
        request = reading.request
        if self._gone(engine, reading):
            return
        del self._waiting[request.key]
        if reading.turns > 1:
            found = len(engine.pool.match(request.reusable_hashes)) * request.block_size
            expect(engine.request_table, request, len(request.token_ids) - found)
        self._fetches.begin(engine, reading.job)
        engine.resume(request.key, Awaits.TIER)

    def _computed_s(self, tokens: int) -> float:
        return tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0)
