"""Server side of fetches: sends cached blocks or embeddings to nodes that ask for them, and holds them meanwhile."""

from __future__ import annotations

import threading

from kvferry.engine.engine import Engine
from kvferry.kv_transfer.fetch import FetchServer, split
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.ports import ShipStats
from kvferry.kv_transfer.sender import Sender
from kvferry.protocol.errors import Draining, GrantRefused, KvferryError, NotFound
from kvferry.protocol.link_messages import EmbeddingSupply, Fetch, Supply
from kvferry.worker.service import NodeParts

AT_ONCE = 16
"""Maximum number of supplies in flight; further fetches are denied, and their nodes compute instead."""


class PrefixSupplier:
    """Supplier of cached blocks to nodes that fetch them.

    Implements `kv_transfer.ports.ShipEvents`, for supplies."""

    def __init__(self, base: NodeParts, sender: Sender) -> None:
        self._base, self._sender = base, sender
        self._lock = threading.Lock()
        self._supplies: dict[int, list[tuple[int, int]]] = {}
        self._server = FetchServer(base.dock, self._wanted)

    # On the engine thread.

    def _supply(self, engine: Engine, peer: Peer, fetch: Fetch) -> None:
        here, kept = _found(engine, fetch)
        if kept <= fetch.first:
            self._server.deny(peer, fetch, NotFound("these blocks are no longer cached here"))
        elif len(self._supplies) >= AT_ONCE:
            self._server.deny(peer, fetch, GrantRefused(f"{AT_ONCE} other nodes are already fetching blocks"))
        else:
            kind = EmbeddingSupply if fetch.embeddings else Supply
            supply = kind(fetch.transfer, len(here), fetch.deadline_s)
            with self._lock:  # the grant may come before `offer` returns
                transfer = self._sender.offer(fetch.asker, supply, self, peer)
                self._supplies[transfer] = list(enumerate(here))
            engine.copies.hold_chain(transfer, here)

    def _quiet(self, engine: Engine, transfer: int) -> None:
        engine.copies.returned(transfer)
        with self._lock:
            del self._supplies[transfer]

    # Called on the link thread.

    def _wanted(self, peer: Peer, fetch: Fetch) -> None:
        try:
            self._base.require_ready()
        except Draining as error:
            self._server.deny(peer, fetch, error)
        else:
            self._base.engine.submit(lambda engine: self._supply(engine, peer, fetch))

    def granted(self, transfer: int, first_block: int) -> None:
        with self._lock:
            blocks = self._supplies[transfer]
        self._sender.ship(transfer, blocks[first_block:])
        self._sender.commit(transfer, None)

    def sent(self, transfer: int) -> None:
        """Do nothing: all blocks of a supply are passed to the sender at once."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        fetches = self._base.metrics.fetches
        fetches.blocks["given"].inc(stats.blocks)
        fetches.bytes["given"].inc(stats.bytes)
        self._base.call_soon(lambda: self._base.rates.shipped(stats.bytes, stats.sending_s))

    def failed(self, transfer: int, error: KvferryError) -> None:
        """Do nothing: the node that fetches counts the failure."""

    def quiet(self, transfer: int) -> None:
        self._base.engine.submit(lambda engine: self._quiet(engine, transfer))


def _found(engine: Engine, fetch: Fetch) -> tuple[list[int], int]:
    """Return the ids of the blocks to send, and how many of the fetch's hashes they have."""
    hashes = split(fetch.hashes)
    if not fetch.embeddings:
        return engine.prefixes.chain(hashes)
    here = engine.pool.match(hashes)
    return (here, len(here)) if len(here) == len(hashes) else ([], 0)
