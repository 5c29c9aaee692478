"""Base of the fetches of blocks from other nodes (prefixes, embeddings): grants, metrics, pauses of failed nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvferry.engine.engine import Engine
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
from kvferry.protocol.link_messages import Commit, EmbeddingSupply, GrantPurpose, Supply
from kvferry.protocol.messages import DecodeTarget
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import NodeParts

BACKOFF_S = 5.0
"""Seconds for which no fetch goes to a node that was late or lost, or that sent corrupt blocks."""
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


class BlockFetches:
    """Fetches of one kind of blocks. Implements `kv_transfer.fetch.FetchEvents`, and `GrantEvents` for their supplies.

    kind: class of the supplies."""

    def __init__(
        self, base: NodeParts, arrivals: GrantDispatch, client: FetchClient, kind: type[Supply | EmbeddingSupply]
    ) -> None:
        self._base, self._arrivals, self._client = base, arrivals, client
        self._backoffs: dict[DecodeTarget, float] = {}
        arrivals.take(kind, self)

    # On the engine thread.

    def _hashes(self, engine: Engine, supply: Supply | EmbeddingSupply) -> Sequence[bytes]:
        """Return the hashes of a supply's blocks. Raises Cancelled if they are no longer wanted."""
        raise NotImplementedError

    def _landed(self, engine: Engine, key: TransferKey, number: int | None) -> None:
        """Register the blocks that a grant received; `number` is its fetch, if that is still open."""
        raise NotImplementedError

    def _failed(self, engine: Engine, number: int, error: KvferryError) -> None:
        """End a fetch that failed, if it is still open."""
        raise NotImplementedError

    def _is_paused(self, node: DecodeTarget) -> bool:
        return self._backoffs.get(node, 0.0) > time.monotonic()

    def _record_failure(self, node: DecodeTarget, error: KvferryError) -> str:
        """Pause fetches from a node for BACKOFF_S if it caused the failure of one; return the fetch's metric label."""
        outcome = next(name for kind, name in OUTCOMES if isinstance(error, kind))
        if outcome in NODE_FAULTS:
            now = time.monotonic()
            self._backoffs = {each: until for each, until in self._backoffs.items() if until > now}
            self._backoffs[node] = now + BACKOFF_S
        return outcome

    def _grant(self, engine: Engine, key: TransferKey, supply: Supply | EmbeddingSupply) -> None:
        """Reserve blocks for a supply, or refuse it."""
        try:
            hashes = self._hashes(engine, supply)
            self._arrivals.receiver.granted(key, *engine.copies.reserve(key, hashes, len(hashes)))
        except Exception as error:
            known = error if isinstance(error, KvferryError) else TransferFailed(reason(error))
            self._arrivals.refuse(key, known)
            self._base.dock.submit(lambda: self.failed(key, known))

    # Called on the link thread.

    def reserve(self, key: TransferKey, purpose: GrantPurpose) -> None:
        assert isinstance(purpose, Supply | EmbeddingSupply)
        if self._client.supplied(key, purpose):
            self._base.engine.submit(lambda engine: self._grant(engine, key, purpose))
        else:
            self._arrivals.refuse(key, Cancelled("these blocks are not wanted"))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        number, fetches = self._client.ended(key), self._base.metrics.fetches
        fetches.blocks["fetched"].inc(commit.block_count)
        fetches.bytes["fetched"].inc(commit.block_count * self._base.parts.layout.block_bytes)
        self._base.engine.submit(lambda engine: self._landed(engine, key, number))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """End the fetch; its blocks stay held until `quiet` (nothing writes them any more)."""
        number = self._client.ended(key)
        if number is not None:
            self.unsupplied(number, error)

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.copies.quiet(key))

    def unsupplied(self, fetch: int, error: KvferryError) -> None:
        self._base.engine.submit(lambda engine: self._failed(engine, fetch, error))
