"""Tiers of a node, between service and engine: reads prompts' prefixes, fastest tier first, and writes new blocks.

The tiers are host memory, disk and the shared store. A request is AWAITING reads that are faster than computing, and
computes blocks that do not arrive in time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged, Event, Failed
from kvferry.engine.request import Key, Request, key_of
from kvferry.engine.request_states import Awaits
from kvferry.engine.request_table import expect
from kvferry.protocol.errors import GrantRefused, KvferryError
from kvferry.protocol.messages import Job
from kvferry.worker.embedding_tiers import EmbeddingTiers
from kvferry.worker.fetch_client import PrefixFetcher
from kvferry.worker.local_writes import LocalWrites
from kvferry.worker.remote_writes import RemoteWrites
from kvferry.worker.service import NodeParts
from kvferry.worker.tier_sources import Grant, Reading, Source, local_source
from kvferry.worker.tier_writer import TierWriter, later

READ_BLOCKS = 256
"""Number of blocks in one read."""
EXTRA_READS = 4
"""Number of reads that a request may await beyond the expected one, since blocks may be evicted soon after a read."""
LOOKUP_DIVISOR = 8
"""Divisor of the computing time that gives the time limit of a lookup in the remote tier."""
MIN_S, SLOWNESS = 1.0, 2.0
"""Time limit of a read: at least MIN_S, and SLOWNESS times the time to compute its blocks."""


class Tiers:
    """Tier reads and writes of a node, between its service and its engine. On the engine thread unless stated.

    embeddings: of media in the node's own tiers, which encode nodes use."""

    def __init__(self, base: NodeParts, fetches: PrefixFetcher) -> None:
        self._base, self._fetches = base, fetches
        self._remote = base.tiers.remote
        self._numbers, transfers = itertools.count(1), itertools.count(-1, -1)
        self._waiting: dict[Key, Reading] = {}
        self._in_flight: dict[bytes, tuple[Grant, list[Reading]]] = {}
        self._late_reads: set[Grant] = set()
        self._writes: list[TierWriter] = []
        self._local = [(tier, local_source(tier)) for tier in base.tiers.local]
        writers = [LocalWrites(base, tier, transfers) for tier in base.tiers.local]
        self._writes += writers
        self.embeddings = EmbeddingTiers(base, writers)
        if (remote := self._remote) is not None:
            self._writes.append(RemoteWrites(base, remote, transfers))
            self._of_remote = Source("remote", remote.seconds, remote.read)

    def add(self, engine: Engine, job: Job, **how: Any) -> None:
        """Add a job as `PrefixFetcher.add` does, after reading its prompt's blocks from the tiers."""
        if not any(tier.used for tier, _ in self._local) and (self._remote is None or self._remote.unavailable):
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
        """Read the next missing blocks, join another request's read, or let the request run."""
        if self._is_stale(engine, reading):
            return
        hashes = reading.request.reusable_hashes
        here = engine.prefixes.count(hashes)
        reading.turns += 1
        if here == len(hashes) or reading.turns > EXTRA_READS + len(hashes) // READ_BLOCKS:
            self._resume(engine, reading)
        elif in_flight := self._in_flight.get(hashes[here]):
            in_flight[1].append(reading)
        elif found := self._local_source(engine, reading.request):
            source, chain = found
            self._read(engine, reading, source, chain, hashes[here])
        elif not self._start_lookup(reading, here):
            self._resume(engine, reading)

    def _local_source(self, engine: Engine, request: Request) -> tuple[Source, Sequence[bytes]] | None:
        """Return the fastest local tier worth reading from, and the chain that the pool has after the read."""
        for tier, source in self._local:
            found = engine.prefixes.readable(request.reusable_hashes, tier.run, READ_BLOCKS)
            if found.saved and self._worth(source, found.missing, found.saved * request.block_size):
                return source, found.chain
        return None

    def _start_lookup(self, reading: Reading, here: int) -> bool:
        """Look the blocks up in the remote tier, and return whether it does so; `_lookup_done` gets the answer.

        It does so only if reading all of them would save time, and if no other node holds blocks, since its pool is
        faster."""
        request, tier = reading.request, self._remote
        if tier is None or reading.job.holder is not None:
            return False
        hashes = request.reusable_hashes
        most = len(hashes) - here
        if not self._worth(self._of_remote, most, most * request.block_size):
            return False
        timeout_s = min(MIN_S, self._computed_s(most * request.block_size) / LOOKUP_DIVISOR)
        done = self._base.engine.submit
        return tier.lookup(
            hashes, here, timeout_s, lambda count: done(lambda engine: self._lookup_done(engine, reading, here, count))
        )

    def _lookup_done(self, engine: Engine, reading: Reading, first: int, count: int) -> None:
        """Read `count` blocks from `first` on; the pool may have lost earlier ones meanwhile."""
        request = reading.request
        if self._is_stale(engine, reading):
            return
        hashes = request.reusable_hashes
        here = len(engine.pool.match(hashes))
        upto = first + count if count else 0
        if here < upto and (in_flight := self._in_flight.get(hashes[here])):
            in_flight[1].append(reading)
        elif here < upto and self._worth(self._of_remote, upto - here, (upto - here) * request.block_size):
            self._read(engine, reading, self._of_remote, hashes[:upto], hashes[here])
        else:
            self._resume(engine, reading)

    def _worth(self, source: Source, blocks: int, tokens: int) -> bool:
        """Return whether reading `blocks` blocks takes less time than computing `tokens` tokens."""
        if not blocks or any(each.source is source for each in self._late_reads):
            return False
        return source.seconds(blocks) < self._computed_s(tokens)

    def _read(self, engine: Engine, reading: Reading, source: Source, hashes: Sequence[bytes], missing: bytes) -> None:
        grant = Grant(source, next(self._numbers))
        try:
            here, block_ids = engine.copies.reserve(grant, hashes, len(hashes))
        except GrantRefused:
            self._base.metrics.tiers.reads[source.name]["refused"].inc()
            self._resume(engine, reading)
            return
        self._in_flight[missing] = (grant, [reading])
        began, done = time.monotonic(), self._base.engine.submit

        def on_read(error: KvferryError | None) -> None:
            done(lambda engine: self._read_done(engine, grant, missing, hashes[here:], time.monotonic() - began, error))

        if not source.read(hashes, here, [*map(self._base.tiers.block, block_ids)], on_read):
            self._ended(engine, grant, missing, "refused")
            return
        timeout_s = max(MIN_S, SLOWNESS * self._computed_s(len(block_ids) * reading.request.block_size))
        later(self._base, timeout_s, lambda engine: self._overdue(engine, grant, missing))

    def _read_done(
        self,
        engine: Engine,
        grant: Grant,
        missing: bytes,
        hashes: Sequence[bytes],
        seconds: float,
        error: KvferryError | None,
    ) -> None:
        """Register the blocks read, unless one of them was retracted as wrong meanwhile."""
        metrics, reason, name = self._base.metrics.tiers, engine.pool.miss_reasons.reason, grant.source.name
        self._late_reads.discard(grant)
        if error is not None or any(reason(each) == "retracted" for each in hashes):
            self._ended(engine, grant, missing, "failed")
            return
        metrics.blocks[name]["read"].inc(len(hashes))
        metrics.seconds[name].inc(seconds)
        engine.copies.land(grant)
        self._notify(engine, grant, missing, "done", self._next)

    def _ended(self, engine: Engine, grant: Grant, missing: bytes, outcome: str) -> None:
        engine.copies.quiet(grant)
        self._notify(engine, grant, missing, outcome, self._resume)

    def _overdue(self, engine: Engine, grant: Grant, missing: bytes) -> None:
        """Pause a slow or hanging source until it answers; its blocks stay held until then."""
        if self._in_flight.get(missing, (None, []))[0] == grant:
            self._late_reads.add(grant)
            self._notify(engine, grant, missing, "late", self._resume)

    def _notify(
        self, engine: Engine, grant: Grant, missing: bytes, outcome: str, proceed: Callable[[Engine, Reading], None]
    ) -> None:
        """Report a read's outcome to all requests that await it, once."""
        if self._in_flight.get(missing, (None, []))[0] == grant:
            _, waiting = self._in_flight.pop(missing)
            self._base.metrics.tiers.reads[grant.source.name][outcome].inc()
            for reading in waiting:
                proceed(engine, reading)

    def _is_stale(self, engine: Engine, reading: Reading) -> bool:
        key = reading.request.key
        return self._waiting.get(key) is not reading or engine.request_table.find(key) is not reading.request

    def _resume(self, engine: Engine, reading: Reading) -> None:
        """Let the request run: missing blocks are fetched from another node, or computed."""
        request = reading.request
        if self._is_stale(engine, reading):
            return
        del self._waiting[request.key]
        if reading.turns > 1:
            found = engine.prefixes.count(request.reusable_hashes) * request.block_size
            expect(engine.request_table, request, len(request.token_ids) - found)
        self._fetches.begin(engine, reading.job)
        engine.resume(request.key, Awaits.TIER)

    def _computed_s(self, tokens: int) -> float:
        return tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0)
