"""Fetches a prompt's media embeddings as blocks from an encode node, or has them computed by this node's own encoder.

An embedding is a row per token. Fetched rows arrive in blocks of the pool, with grant, checksums and commit like any
fetch; this node's tiers do not keep them, since those of the encode node do. A fetch that fails costs only its time:
the rows are then computed here. An encode node that was late or lost, or sent corrupt rows, is not asked again for
BACKOFF_S."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.media.embedding_blocks import EmbeddingBlocks
from kvferry.engine.media.encoder import EmbeddingSource, Ready
from kvferry.kv_transfer.fetch import FetchClient
from kvferry.kv_transfer.ports import TransferKey
from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.protocol.link_messages import EmbeddingSupply, Supply
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import DecodeTarget
from kvferry.worker.block_fetches import BlockFetches
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import NodeParts

MIN_S, SLOWEST_BYTES_PER_S = 1.0, 50e6
"""Time limit of a fetch: MIN_S seconds, plus the time for its bytes at this rate."""


@dataclass(slots=True, eq=False)
class Wanted:
    """Media whose rows a request waits for, until `ready` was called or the request was cancelled.

    rows: rows found, by index of the item. fetched: items that were fetched, once each. stop: cancels the running work.
    """

    root: bytes
    items: Sequence[MediaItem]
    ready: Ready
    deadline: float
    encoder: DecodeTarget | None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    stop: Callable[[], None] | None = None
    over: bool = False

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def end(self, outcome: Sequence[torch.Tensor] | Exception) -> None:
        """Call `ready`, once."""
        if not self.over:
            self.over = True
            self.ready(outcome)


@dataclass(slots=True, eq=False)
class RunFetch:
    """Fetch of one run of blocks, and the media that wait for it."""

    holder: DecodeTarget
    hashes: Sequence[bytes]
    began: float
    waiting: list[Wanted]


class EmbeddingFetcher(BlockFetches):
    """Source of media embeddings. Implements `EmbeddingSource`.

    blocks: keeps rows in the pool. local: this node's encoder. Runs on the engine thread unless stated."""

    def __init__(
        self,
        base: NodeParts,
        arrivals: GrantDispatch,
        client: FetchClient,
        blocks: EmbeddingBlocks,
        local: EmbeddingSource,
    ) -> None:
        super().__init__(base, arrivals, client, EmbeddingSupply)
        self.blocks, self.local = blocks, local
        self._open: dict[int, RunFetch] = {}
        self._coming: dict[bytes, int] = {}

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        """See `EmbeddingSource`. From any thread; `ready` is called on the engine thread or the encoder's."""
        wanted = Wanted(root, items, ready, time.monotonic() + deadline_s, encoder)
        self._base.engine.submit(lambda engine: self._go_on((wanted,)))
        return lambda: self._base.engine.submit(lambda engine: self._cancel(wanted))

    @property
    def busy(self) -> bool:
        """Return whether fetches are open."""
        return bool(self._open)

    def _next(self, wanted: Wanted) -> None:
        """Look for the rows in the pool, fetch the next missing run, or have the rows computed here."""
        if wanted.over:
            return
        wanted.stop = None
        for place, item in enumerate(wanted.items):
            if place in wanted.rows:
                continue
            hashes = self.blocks.hashes(wanted.root, item)
            rows = self.blocks.load(hashes, item.length)
            if rows is not None:
                wanted.rows[place] = rows
            elif wanted.encoder is not None and place not in wanted.fetched and not self._is_paused(wanted.encoder):
                wanted.fetched.add(place)
                self._fetch(wanted, wanted.encoder, hashes)
                return
        if len(wanted.rows) == len(wanted.items):
            wanted.end([wanted.rows[place] for place in range(len(wanted.items))])
        else:
            self._make(wanted)

    def _fetch(self, wanted: Wanted, encoder: DecodeTarget, hashes: Sequence[bytes]) -> None:
        """Fetch one run, or join a fetch of the same run."""
        if (number := self._coming.get(hashes[0])) is None:
            limit_s = MIN_S + len(hashes) * self._base.parts.layout.block_bytes / SLOWEST_BYTES_PER_S
            number = self._client.ask(  # a limit of its own: a short deadline of the request is not the node's fault
                self, encoder.link_address, self._base.target, 0, hashes, limit_s, embeddings=True
            )
            self._open[number] = RunFetch(encoder, hashes, time.monotonic(), [])
            self._coming[hashes[0]] = number
        self._open[number].waiting.append(wanted)
        wanted.stop = lambda: self._leave(number, wanted)

    def _make(self, wanted: Wanted) -> None:
        """Have the missing rows computed by this node's encoder."""
        missing = [place for place in range(len(wanted.items)) if place not in wanted.rows]

        def made(outcome: Sequence[torch.Tensor] | Exception) -> None:
            if isinstance(outcome, Exception):
                wanted.end(outcome)
                return
            found = wanted.rows | dict(zip(missing, outcome, strict=True))
            wanted.end([found[place] for place in range(len(wanted.items))])

        items = [wanted.items[place] for place in missing]
        wanted.stop = self.local.submit(wanted.root, items, made, wanted.left_s)

    def _cancel(self, wanted: Wanted) -> None:
        wanted.over = True
        if wanted.stop is not None:
            wanted.stop()

    def _leave(self, number: int, wanted: Wanted) -> None:
        """Stop waiting for a fetch; cancel it if nothing else waits for it."""
        if (fetch := self._open.get(number)) is None:
            return
        fetch.waiting.remove(wanted)
        if not fetch.waiting:
            self._client.abandon(number)
            self._close(number, "cancelled")

    def _hashes(self, engine: Engine, supply: Supply | EmbeddingSupply) -> Sequence[bytes]:
        fetch = self._open.get(supply.fetch)
        if fetch is None or supply.count != len(fetch.hashes):
            raise Cancelled("these blocks are no longer wanted")
        return fetch.hashes

    def _landed(self, engine: Engine, key: TransferKey, number: int | None) -> None:
        """Register the blocks that arrived, even if nothing waits for them any more."""
        engine.copies.land(key, tiers=False)
        if number in self._open:
            self._base.metrics.fetches.seconds.inc(time.monotonic() - self._open[number].began)
            self._go_on(self._close(number, "done"))

    def _failed(self, engine: Engine, number: int, error: KvferryError) -> None:
        """End a failed fetch: the media that waited for it do without that node."""
        if number not in self._open:
            return
        holder = self._open[number].holder
        waiting = self._close(number, self._record_failure(holder, error))
        for wanted in waiting:
            if wanted.encoder == holder:
                wanted.encoder = None
        self._go_on(waiting)

    def _close(self, number: int, outcome: str) -> list[Wanted]:
        """Remove a fetch, count its outcome, and return the media that waited for it."""
        fetch = self._open.pop(number)
        del self._coming[fetch.hashes[0]]
        self._base.metrics.fetches.ended[outcome].inc()
        return fetch.waiting

    def _go_on(self, waiting: Iterable[Wanted]) -> None:
        """Continue with each of them; an error ends that one, which would otherwise wait forever."""
        for wanted in waiting:
            try:
                self._next(wanted)
            except Exception as error:
                wanted.end(error)


def embedding_fetcher(base: NodeParts, arrivals: GrantDispatch, client: FetchClient) -> EmbeddingFetcher | None:
    """Put a fetcher before the engine's own source of embeddings, and return it; None for a node without an encoder.

    None, too, if each rank has a pool of its own, since such ranks keep no rows in blocks."""
    parts, media = base.parts, base.parts.engine.media
    if media.encoder is None or media.source is None or parts.apart is not None:
        return None
    blocks = EmbeddingBlocks(parts.engine.pool, parts.kv, media.encoder.width, parts.engine.runner.model.dtype)
    media.source = fetcher = EmbeddingFetcher(base, arrivals, client, blocks, media.source)
    return fetcher
