"""Prefix fetch: copies a prompt's leading KV blocks from another node instead of computing them.

The request is AWAITING meanwhile, at most a bounded time longer than computing would take.

A fetch transfers the blocks piece by piece; pieces that arrived are kept even if the next one fails. Requests that lack
the same blocks share one fetch. Each piece may take SLOWNESS times its computing time. A holder that is late or lost is
not asked again for SHUN_S."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.events import Event, Failed
from kvferry.engine.request import Key, Request, key_of
from kvferry.engine.request_states import Awaits
from kvferry.engine.request_table import expect
from kvferry.kv_transfer.fetch import FetchClient
from kvferry.kv_transfer.ports import TransferKey
from kvferry.protocol.errors import (
    BlocksCorrupt,
    Cancelled,
    DeadlineExceeded,
    Draining,
    GrantRefused,
    KvferryError,
    NotFound,
    TransferFailed,
    reason,
)
from kvferry.protocol.link_messages import Asked, Commit, Supply
from kvferry.protocol.messages import DecodeTarget, Holder, Job
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import Base

PIECE = 256
"""Blocks of one fetch."""
TURNS = 4
"""Fetches that a request may await beyond the expected number, because blocks get evicted or fetches cancelled."""
LEAST_S, SLOWNESS = 1.0, 2.0
"""Time limit of a piece: at least LEAST_S, and SLOWNESS times the time to compute it here."""
SHUN_S = 5.0
"""Seconds for which a holder is not asked after it was late, lost, or sent corrupt blocks."""
OUTCOMES: tuple[tuple[type[KvferryError], str], ...] = (
    (NotFound, "lacking"),
    (GrantRefused, "refused"),
    (Draining, "refused"),
    (DeadlineExceeded, "late"),
    (BlocksCorrupt, "corrupt"),
    (KvferryError, "lost"),
)
"""Metric label of a failed fetch: that of the first class that its error is an instance of."""
NODE_FAULTS = ("late", "corrupt", "lost")


@dataclass(slots=True, eq=False)
class PendingFetch:
    """Request that awaits blocks from another node.

    number: id of its own fetch, 0 while it awaits another request's. missing: hash of the first block that the fetch
    brings. hashes: of all blocks up to the last one. turns: fetches awaited so far. others: requests that await the
    same fetch."""

    request: Request
    holder: Holder
    number: int = 0
    missing: bytes = b""
    hashes: Sequence[bytes] = ()
    asked_at: float = 0.0
    turns: int = 0
    others: list[PendingFetch] = field(default_factory=list)


class PrefixFetcher:
    """Client side of prefix fetches: requests blocks from holders and places them in the pool.

    Implements `kv_transfer.fetch.FetchEvents`, and `kv_transfer.ports.GrantEvents` for supplies. Runs on the engine
    thread unless stated."""

    def __init__(self, base: Base, arrivals: GrantDispatch) -> None:
        self._base, self._arrivals = base, arrivals
        self._asker = FetchClient(base.dock, self, arrivals.receiver.cancel)
        arrivals.take(Supply, self)
        self._waiting: dict[Key, PendingFetch] = {}
        self._open: dict[int, PendingFetch] = {}
        self._coming: dict[bytes, PendingFetch] = {}
        self._shunned: dict[DecodeTarget, float] = {}

    def add(self, engine: Engine, job: Job, **how: Any) -> None:
        """Add a job to the engine; if it names a holder, first fetch the blocks that this node lacks."""
        if job.holder is None:
            engine.add(job, **how)
            return
        engine.add(job, awaits=(Awaits.FETCH,), **how)
        self.begin(engine, job)

    def begin(self, engine: Engine, job: Job) -> None:
        """Start the fetch of a job that is in the engine and awaits one."""
        request = engine.request_table.find(key_of(job))
        awaited = request is not None and Awaits.FETCH in request.awaits and request.key not in self._waiting
        if request is not None and awaited and job.holder is not None:
            self._waiting[request.key] = fetching = PendingFetch(request, job.holder)
            self._next(engine, fetching)

    def take(self, events: Sequence[Event]) -> None:
        """Stop fetches for requests that ended."""
        for event in events:
            if isinstance(event, Failed) and event.key in self._waiting:
                self._base.engine.submit(lambda engine, key=event.key: self._ended(engine, key))  # type: ignore[misc]

    def _next(self, engine: Engine, fetching: PendingFetch) -> None:
        """Fetch the next missing piece, join another request's fetch, or let the request run."""
        request, holder = fetching.request, fetching.holder
        if self._gone(engine, fetching):
            return
        hashes = request.reusable_hashes[: holder.blocks]
        here = len(engine.pool.match(hashes))
        fetching.turns += 1
        shunned = self._shunned.get(holder.node, 0.0) > time.monotonic()
        if here == len(hashes) or shunned or fetching.turns > TURNS + len(hashes) // PIECE:
            self._go_on(engine, fetching)
        elif leader := self._coming.get(hashes[here]):
            leader.others.append(fetching)
        else:
            self._ask(engine, fetching, here, hashes[: here + PIECE])

    def _ask(self, engine: Engine, fetching: PendingFetch, here: int, hashes: Sequence[bytes]) -> None:
        engine.pool.miss_reasons.note(hashes[here:], "not_arrived")
        fetching.missing, fetching.hashes, fetching.asked_at = hashes[here], hashes, time.monotonic()
        patience_s = self._patience_s((len(hashes) - here) * fetching.request.block_size)
        fetching.number = self._asker.ask(fetching.holder.node.link_address, self._here, here, hashes, patience_s)
        self._open[fetching.number] = self._coming[fetching.missing] = fetching

    def _gone(self, engine: Engine, fetching: PendingFetch) -> bool:
        """Return whether the request is no longer waiting, or has been replaced or removed in the engine.

        A request that ended in this turn is reported by `take`."""
        request = fetching.request
        return self._waiting.get(request.key) is not fetching or engine.request_table.find(request.key) is not request

    def _go_on(self, engine: Engine, fetching: PendingFetch) -> None:
        """Let the request run; it computes the blocks that did not arrive."""
        request = fetching.request
        if self._gone(engine, fetching):
            return
        del self._waiting[request.key]
        found = len(engine.pool.match(request.reusable_hashes)) * request.block_size
        expect(engine.request_table, request, len(request.token_ids) - found)
        engine.resume(request.key, Awaits.FETCH)

    def _ended(self, engine: Engine, key: Key) -> None:
        """Cancel the fetch of a request that ended; requests that shared it start their own."""
        fetching = self._waiting.get(key)
        if fetching is None or engine.request_table.find(key) is fetching.request:
            return
        del self._waiting[key]
        if fetching.number:
            self._asker.give_up(fetching.number)
            for other in self._closed(fetching, "cancelled"):
                self._next(engine, other)

    def _grant(self, engine: Engine, key: TransferKey, supply: Supply) -> None:
        """Reserve blocks for a supply, or refuse it."""
        try:
            fetching = self._open.get(supply.fetch)
            if fetching is None:
                raise Cancelled("these blocks are no longer wanted")
            hashes = fetching.hashes[: supply.count]
            self._arrivals.receiver.granted(key, *engine.copies.reserve(key, hashes, len(hashes)))
        except Exception as error:
            known = error if isinstance(error, KvferryError) else TransferFailed(reason(error))
            self._arrivals.refuse(key, known)
            self._base.dock.submit(lambda: self.failed(key, known))

    def _landed(self, engine: Engine, key: TransferKey, number: int | None) -> None:
        """Register arrived blocks, even if no request awaits them any more, and continue the requests."""
        blocks = engine.copies.land(key)
        if number in self._open:
            fetching = self._open[number]
            self._base.metrics.fetches.seconds.inc(time.monotonic() - fetching.asked_at)
            for each in (fetching, *self._closed(fetching, "done")):
                own = len(engine.pool.match(each.request.reusable_hashes))
                each.request.fetched += ((blocks[0], min(blocks[1], own)),)
                self._next(engine, each)

    def _failed(self, engine: Engine, number: int, error: KvferryError) -> None:
        """End a failed fetch; requests with the same holder compute, others fetch from their own."""
        if number not in self._open:
            return
        fetching, outcome = self._open[number], next(name for kind, name in OUTCOMES if isinstance(error, kind))
        if outcome in NODE_FAULTS:
            now = time.monotonic()
            self._shunned = {holder: until for holder, until in self._shunned.items() if until > now}
            self._shunned[fetching.holder.node] = now + SHUN_S
        for each in (fetching, *self._closed(fetching, outcome)):
            if each.holder.node != fetching.holder.node:
                self._next(engine, each)
            else:
                self._go_on(engine, each)

    def _closed(self, fetching: PendingFetch, outcome: str) -> list[PendingFetch]:
        """Remove the fetch, count its outcome, and return the other requests that awaited it."""
        self._base.metrics.fetches.ended[outcome].inc()
        del self._open[fetching.number], self._coming[fetching.missing]
        others, fetching.others, fetching.number = fetching.others, [], 0
        return others

    @property
    def _here(self) -> DecodeTarget:
        """Return this node as the target of a grant."""
        base = self._base
        return DecodeTarget(base.dock.name[0], base.epoch, base.dock.link.address, base.parts.fingerprint)

    def _patience_s(self, tokens: int) -> float:
        return max(LEAST_S, SLOWNESS * tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0))

    # Called on the link thread.

    def reserve(self, key: TransferKey, asked: Asked) -> None:
        assert isinstance(asked, Supply)
        if self._asker.supplied(key, asked):
            self._base.engine.submit(lambda engine: self._grant(engine, key, asked))
        else:
            self._arrivals.refuse(key, Cancelled("these blocks are not wanted"))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        number, fetches = self._asker.ended(key), self._base.metrics.fetches
        fetches.blocks["fetched"].inc(commit.block_count)
        fetches.bytes["fetched"].inc(commit.block_count * self._base.parts.layout.block_bytes)
        self._base.engine.submit(lambda engine: self._landed(engine, key, number))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """End the fetch; its blocks stay held until `quiet`."""
        number = self._asker.ended(key)
        if number is not None:
            self.unsupplied(number, error)

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.copies.quiet(key))

    def unsupplied(self, fetch: int, error: KvferryError) -> None:
        self._base.engine.submit(lambda engine: self._failed(engine, fetch, error))
