"""Prefix fetch from other nodes instead of computing.

A request is AWAITING meanwhile, which may cost no more than a bounded time over computing.

A fetch goes piece by piece; what came is kept whatever becomes of the next. Requests that lack the same blocks await
one fetch. Each piece has the time in which it could be computed, and somewhat more; a holder that does not keep to
that, or is lost, is left alone for a while.
"""

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
"""Fetches that a request awaits beyond those that its blocks are worth: what came may be evicted at once, and others'
fetches may be given up."""
LEAST_S, SLOWNESS = 1.0, 2.0
"""A piece has so many seconds, or so many times as long as computing it would take here, if that is more."""
SHUN_S = 5.0
"""How long a holder is left alone that was late, lost, or sent what was not right."""
OUTCOMES: tuple[tuple[type[KvferryError], str], ...] = (
    (NotFound, "lacking"),
    (GrantRefused, "refused"),
    (Draining, "refused"),
    (DeadlineExceeded, "late"),
    (BlocksCorrupt, "corrupt"),
    (KvferryError, "lost"),
)
"""As metrics call the end of a fetch, by the first kind of its error."""
BLAMED = ("late", "corrupt", "lost")


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A request that awaits blocks.

    number: of the fetch that it asked for, 0 while it awaits another's; missing: hash of the first block that comes by
    it; hashes: of all until its last one; turns: how many fetches it awaited; others: those that await the same blocks.
    """

    request: Request
    holder: Holder
    number: int = 0
    missing: bytes = b""
    hashes: Sequence[bytes] = ()
    asked_at: float = 0.0
    turns: int = 0
    others: list[PendingFetch] = field(default_factory=list)


class PrefixFetcher:
    """Implements kv_transfer.fetch.FetchEvents, and kv_transfer.ports.GrantEvents of supplies.

    Owned by the engine thread, but for what says otherwise."""

    def __init__(self, base: Base, arrivals: GrantDispatch) -> None:
        self._base, self._arrivals = base, arrivals
        self._asker = FetchClient(base.dock, self, arrivals.receiver.cancel)
        arrivals.take(Supply, self)
        self._waiting: dict[Key, PendingFetch] = {}
        self._open: dict[int, PendingFetch] = {}
        self._coming: dict[bytes, PendingFetch] = {}
        self._shunned: dict[DecodeTarget, float] = {}

    def add(self, engine: Engine, job: Job, **how: Any) -> None:
        """`Engine.add`: where the job names a holder, it awaits what that has of its prompt and this node has not."""
        if job.holder is None:
            engine.add(job, **how)
            return
        engine.add(job, awaits=(Awaits.FETCH,), **how)
        self.begin(engine, job)

    def begin(self, engine: Engine, job: Job) -> None:
        """An attempt that awaits a fetch has what this node can bring of its prompt itself."""
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
        """Ask for what is still missing, await it with others, or let the request go on."""
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
        """Return whether nothing more is to be done for it. One that ended in this very turn is told of by `take`."""
        request = fetching.request
        return self._waiting.get(request.key) is not fetching or engine.request_table.find(request.key) is not request

    def _go_on(self, engine: Engine, fetching: PendingFetch) -> None:
        """It computes what has not come."""
        request = fetching.request
        if self._gone(engine, fetching):
            return
        del self._waiting[request.key]
        found = len(engine.pool.match(request.reusable_hashes)) * request.block_size
        expect(engine.request_table, request, len(request.token_ids) - found)
        engine.resume(request.key, Awaits.FETCH)

    def _ended(self, engine: Engine, key: Key) -> None:
        """Its own fetch is of no use any more; those that awaited it, too, ask themselves."""
        fetching = self._waiting.get(key)
        if fetching is None or engine.request_table.find(key) is fetching.request:
            return
        del self._waiting[key]
        if fetching.number:
            self._asker.give_up(fetching.number)
            for other in self._closed(fetching, "cancelled"):
                self._next(engine, other)

    def _grant(self, engine: Engine, key: TransferKey, supply: Supply) -> None:
        try:
            fetching = self._open.get(supply.fetch)
            if fetching is None:
                raise Cancelled("nobody waits for these blocks any more")
            hashes = fetching.hashes[: supply.count]
            self._arrivals.receiver.granted(key, *engine.copies.reserve(key, hashes, len(hashes)))
        except Exception as error:
            known = error if isinstance(error, KvferryError) else TransferFailed(reason(error))
            self._arrivals.refuse(key, known)
            self._base.dock.submit(lambda: self.failed(key, known))

    def _landed(self, engine: Engine, key: TransferKey, number: int | None) -> None:
        """Of a fetch that nobody awaits any more, too: its blocks are here now."""
        blocks = engine.copies.land(key)
        if number in self._open:
            fetching = self._open[number]
            self._base.metrics.fetches.seconds.inc(time.monotonic() - fetching.asked_at)
            for each in (fetching, *self._closed(fetching, "done")):
                own = len(engine.pool.match(each.request.reusable_hashes))
                each.request.fetched += ((blocks[0], min(blocks[1], own)),)
                self._next(engine, each)

    def _failed(self, engine: Engine, number: int, error: KvferryError) -> None:
        """Who counts on the same holder does not ask it again."""
        if number not in self._open:
            return
        fetching, outcome = self._open[number], next(name for kind, name in OUTCOMES if isinstance(error, kind))
        if outcome in BLAMED:
            now = time.monotonic()
            self._shunned = {holder: until for holder, until in self._shunned.items() if until > now}
            self._shunned[fetching.holder.node] = now + SHUN_S
        for each in (fetching, *self._closed(fetching, outcome)):
            if each.holder.node != fetching.holder.node:
                self._next(engine, each)
            else:
                self._go_on(engine, each)

    def _closed(self, fetching: PendingFetch, outcome: str) -> list[PendingFetch]:
        """Its fetch has ended so; who else awaited it is returned."""
        self._base.metrics.fetches.ended[outcome].inc()
        del self._open[fetching.number], self._coming[fetching.missing]
        others, fetching.others, fetching.number = fetching.others, [], 0
        return others

    @property
    def _here(self) -> DecodeTarget:
        """As grants are asked for at this node."""
        base = self._base
        return DecodeTarget(base.dock.name[0], base.epoch, base.dock.link.address, base.parts.fingerprint)

    def _patience_s(self, tokens: int) -> float:
        return max(LEAST_S, SLOWNESS * tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0))

    # The link thread.

    def reserve(self, key: TransferKey, asked: Asked) -> None:
        assert isinstance(asked, Supply)
        if self._asker.supplied(key, asked):
            self._base.engine.submit(lambda engine: self._grant(engine, key, asked))
        else:
            self._arrivals.refuse(key, Cancelled("nobody waits for these blocks"))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        number, fetches = self._asker.ended(key), self._base.metrics.fetches
        fetches.blocks["fetched"].inc(commit.block_count)
        fetches.bytes["fetched"].inc(commit.block_count * self._base.parts.layout.block_bytes)
        self._base.engine.submit(lambda engine: self._landed(engine, key, number))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """Its blocks stay held until it is quiet."""
        number = self._asker.ended(key)
        if number is not None:
            self.unsupplied(number, error)

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.copies.quiet(key))

    def unsupplied(self, fetch: int, error: KvferryError) -> None:
        self._base.engine.submit(lambda engine: self._failed(engine, fetch, error))
