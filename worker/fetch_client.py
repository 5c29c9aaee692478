"""Prefix fetch: copies a prompt's leading KV blocks from another node's pool instead of computing them.

The request is AWAITING meanwhile, for a bounded time.

A fetch transfers the blocks piece by piece; pieces that arrived are kept even if the next one fails. Requests that lack
the same blocks share one fetch. Each piece may take SLOWNESS times its computing time. A holder that is late or lost is
not asked again for BACKOFF_S."""

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
from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.protocol.link_messages import EmbeddingSupply, Supply
from kvferry.protocol.messages import Holder, Job
from kvferry.worker.block_fetches import BlockFetches
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import NodeParts

FETCH_BLOCKS = 256
"""Number of blocks in one fetch."""
EXTRA_FETCHES = 4
"""Number of fetches that a request may await beyond the expected one, since blocks are evicted or fetches cancelled."""
MIN_S, SLOWNESS = 1.0, 2.0
"""Time limit of a piece: at least MIN_S, and SLOWNESS times the time to compute it here."""


@dataclass(slots=True, eq=False)
class PendingFetch:
    """Request that awaits blocks from another node.

    number: id of its own fetch, 0 while it awaits another request's. missing: hash of the first block of the fetch.
    hashes: hashes of all blocks up to the fetch's last one. turns: number of fetches awaited. others: requests that
    await the same fetch."""

    request: Request
    holder: Holder
    number: int = 0
    missing: bytes = b""
    hashes: Sequence[bytes] = ()
    sent_at: float = 0.0
    turns: int = 0
    others: list[PendingFetch] = field(default_factory=list)


class PrefixFetcher(BlockFetches):
    """Client side of prefix fetches: requests blocks from holders and places them in the pool, on the engine thread."""

    def __init__(self, base: NodeParts, arrivals: GrantDispatch, client: FetchClient) -> None:
        super().__init__(base, arrivals, client, Supply)
        self._waiting: dict[Key, PendingFetch] = {}
        self._open: dict[int, PendingFetch] = {}
        self._in_flight: dict[bytes, PendingFetch] = {}

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
        if self._is_stale(engine, fetching):
            return
        hashes = request.reusable_hashes[: holder.blocks]
        here = engine.prefixes.count(hashes)
        fetching.turns += 1
        piece = FETCH_BLOCKS if engine.states is None else len(hashes)  # a checkpoint comes with all blocks before it
        if (
            here == len(hashes)
            or self._is_paused(holder.node)
            or fetching.turns > EXTRA_FETCHES + len(hashes) // FETCH_BLOCKS
        ):
            self._resume(engine, fetching)
        elif leader := self._in_flight.get(hashes[here]):
            leader.others.append(fetching)
        else:
            self._ask(engine, fetching, here, hashes[: here + piece])

    def _ask(self, engine: Engine, fetching: PendingFetch, here: int, hashes: Sequence[bytes]) -> None:
        engine.pool.miss_reasons.note(hashes[here:], "not_arrived")
        fetching.missing, fetching.hashes, fetching.sent_at = hashes[here], hashes, time.monotonic()
        timeout_s = self._timeout_s((len(hashes) - here) * fetching.request.block_size)
        fetching.number = self._client.ask(
            self, fetching.holder.node.link_address, self._base.target, here, hashes, timeout_s
        )
        self._open[fetching.number] = self._in_flight[fetching.missing] = fetching

    def _is_stale(self, engine: Engine, fetching: PendingFetch) -> bool:
        """Return whether the request is no longer waiting, or has been replaced or removed in the engine.

        A request that ended in this turn is reported by `take`."""
        request = fetching.request
        return self._waiting.get(request.key) is not fetching or engine.request_table.find(request.key) is not request

    def _resume(self, engine: Engine, fetching: PendingFetch) -> None:
        """Let the request run; it computes the blocks that did not arrive."""
        request = fetching.request
        if self._is_stale(engine, fetching):
            return
        del self._waiting[request.key]
        found = engine.prefixes.count(request.reusable_hashes) * request.block_size
        expect(engine.request_table, request, len(request.token_ids) - found)
        engine.resume(request.key, Awaits.FETCH)

    def _ended(self, engine: Engine, key: Key) -> None:
        """Cancel the fetch of a request that ended; requests that shared it start their own."""
        fetching = self._waiting.get(key)
        if fetching is None or engine.request_table.find(key) is fetching.request:
            return
        del self._waiting[key]
        if fetching.number:
            self._client.abandon(fetching.number)
            for other in self._closed(fetching, "cancelled"):
                self._next(engine, other)

    def _hashes(self, engine: Engine, supply: Supply | EmbeddingSupply) -> Sequence[bytes]:
        fetching = self._open.get(supply.fetch)
        if fetching is None:
            raise Cancelled("these blocks are no longer wanted")
        return engine.prefixes.supplied(fetching.hashes, supply.count)

    def _landed(self, engine: Engine, key: TransferKey, number: int | None) -> None:
        """Register arrived blocks, even if no request awaits them any more, and continue the requests."""
        blocks = engine.copies.land(key)
        if number in self._open:
            fetching = self._open[number]
            self._base.metrics.fetches.seconds.inc(time.monotonic() - fetching.sent_at)
            for each in (fetching, *self._closed(fetching, "done")):
                own = engine.prefixes.count(each.request.reusable_hashes)
                each.request.fetched += ((blocks[0], min(blocks[1], own)),)
                (self._next if engine.states is None else self._resume)(engine, each)

    def _failed(self, engine: Engine, number: int, error: KvferryError) -> None:
        """End a failed fetch; requests with the same holder compute, requests with another holder fetch from that."""
        if number not in self._open:
            return
        fetching = self._open[number]
        outcome = self._record_failure(fetching.holder.node, error)
        for each in (fetching, *self._closed(fetching, outcome)):
            if each.holder.node != fetching.holder.node:
                self._next(engine, each)
            else:
                self._resume(engine, each)

    def _closed(self, fetching: PendingFetch, outcome: str) -> list[PendingFetch]:
        """Remove the fetch, count its outcome, and return the other requests that awaited it."""
        self._base.metrics.fetches.ended[outcome].inc()
        del self._open[fetching.number], self._in_flight[fetching.missing]
        others, fetching.others, fetching.number = fetching.others, [], 0
        return others

    def _timeout_s(self, tokens: int) -> float:
        return max(MIN_S, SLOWNESS * tokens / max(self._base.rates.rates.prefill_tokens_per_s, 1.0))
