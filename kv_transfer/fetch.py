"""Fetch protocol: FetchClient requests cached KV blocks or embeddings of another node, FetchServer receives requests.

The blocks themselves travel as a ship: the holder requests a grant on the connection on which it was asked. A fetch has
its own deadline and is not retried, because the asking node can always compute the blocks instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.ports import TransferKey
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol import errors
from kvferry.protocol.errors import Cancelled, DeadlineExceeded, KvferryError
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.protocol.link_messages import EmbeddingSupply, Fetch, NoSupply, Supply
from kvferry.protocol.messages import DecodeTarget


class FetchEvents(Protocol):
    """Events of a node's fetches. All calls come on the link thread."""

    def unsupplied(self, fetch: int, error: KvferryError) -> None:
        """Handle a fetch that gets no blocks. Not called for an abandoned fetch, nor after its grant ended."""


@dataclass(slots=True, eq=False)
class OpenFetch:
    """A fetch in flight.

    events: notified of its end. grant: set when the holder requests a grant for the blocks. deadline: of the whole
    fetch, in seconds of the dock's clock."""

    fetch: int
    events: FetchEvents
    peer: Peer
    deadline: float
    grant: TransferKey | None = None

    @property
    def key(self) -> int:
        """Return the fetch's number."""
        return self.fetch


class FetchClient:
    """Client that requests blocks from other nodes. Implements kv_transfer.dock.Endpoint.

    `ask` and `abandon` may be called from any thread; everything else runs on the link thread.

    cancel  cancels an open grant; the receiver then reports its end
    """

    takes = (NoSupply,)

    def __init__(self, dock: Dock, cancel: Callable[[TransferKey, KvferryError], None]) -> None:
        self._dock, self._cancel = dock, cancel
        self._numbers = itertools.count(1)
        self._by_grant: dict[TransferKey, OpenFetch] = {}
        self.transfers: Transfers[OpenFetch] = Transfers(dock.watch)
        dock.mount(self)

    def ask(
        self,
        events: FetchEvents,
        holder: str,
        asker: DecodeTarget,
        first: int,
        hashes: Sequence[bytes],
        timeout_s: float,
        *,
        embeddings: bool = False,
    ) -> int:
        """Ask the node at link address `holder` for the blocks of `hashes` from index `first` on; return the number.

        timeout_s: seconds until the fetch fails. embeddings: see `Fetch`."""
        number = next(self._numbers)
        fetch = Fetch(number, asker, first, b"".join(hashes), timeout_s, embeddings)
        self._dock.submit(lambda: self._ask(events, holder, fetch))
        return number

    def abandon(self, number: int) -> None:
        """Abandon a fetch whose result is not needed any more."""
        self._dock.submit(lambda: self._abandon(number))

    def supplied(self, key: TransferKey, supply: Supply | EmbeddingSupply) -> bool:
        """Bind a requested grant to its fetch; return False if no fetch waits for it, or if the fetch has a grant."""
        fetch = self.transfers.find(supply.fetch)
        if fetch is None or fetch.grant is not None or fetch.peer != key[0]:
            return False
        fetch.grant = key
        self._by_grant[key] = fetch
        return True

    def ended(self, key: TransferKey) -> int | None:
        """End the fetch of a grant that ended or was refused here; return the fetch's number, if it was in flight."""
        fetch = self._by_grant.get(key)
        if fetch is None:
            return None
        self._forget(fetch)
        return fetch.fetch

    # Calls of the dock.

    def take(self, peer: Peer, message: NoSupply) -> None:
        fetch = self.transfers.find(message.transfer)
        if fetch is not None and fetch.peer == peer and fetch.grant is None:
            self.fail(fetch, errors.from_body({"error": {"code": message.code, "message": message.message}}))

    def forget(self, peer: Peer) -> None:
        """Do nothing: the fetches of the connection end by `fail`."""

    def fail(self, fetch: OpenFetch, error: KvferryError) -> None:
        self._forget(fetch)
        fetch.events.unsupplied(fetch.fetch, error)

    def closed(self, fetch: OpenFetch) -> None:
        """Do nothing: the fetch ended when its connection began to close."""

    def overdue(self, fetch: OpenFetch) -> None:
        error = DeadlineExceeded("the blocks did not arrive in time")
        if fetch.grant is not None:
            self._cancel(fetch.grant, error)
        else:
            self.fail(fetch, error)

    def _ask(self, events: FetchEvents, holder: str, fetch: Fetch) -> None:
        peer = self._dock.dial(holder)
        self.transfers.add(OpenFetch(fetch.transfer, events, peer, self._dock.clock() + fetch.deadline_s))
        self._dock.send(peer, fetch)

    def _abandon(self, number: int) -> None:
        fetch = self.transfers.find(number)
        if fetch is not None:
            self._forget(fetch)
            if fetch.grant is not None:
                self._cancel(fetch.grant, Cancelled("the blocks are no longer wanted"))

    def _forget(self, fetch: OpenFetch) -> None:
        self.transfers.remove(fetch)
        if fetch.grant is not None:
            del self._by_grant[fetch.grant]


class FetchServer:
    """Server that receives the fetches of other nodes. Implements kv_transfer.dock.Endpoint.

    wanted: called for each fetch, on the link thread. A repeated fetch is passed on again; the asking node refuses
    grants that it does not need."""

    takes = (Fetch,)

    def __init__(self, dock: Dock, wanted: Callable[[Peer, Fetch], None]) -> None:
        self._dock, self._wanted = dock, wanted
        self.transfers: Transfers[OpenFetch] = Transfers(dock.watch)
        dock.mount(self)

    def deny(self, peer: Peer, fetch: Fetch, error: KvferryError) -> None:
        """Answer that the node sends no blocks. Thread-safe."""
        answer = NoSupply(fetch.transfer, error.code, error.message)
        self._dock.submit(lambda: self._dock.send(peer, answer))

    def take(self, peer: Peer, message: Fetch) -> None:
        self._wanted(peer, message)

    def forget(self, peer: Peer) -> None:
        """Do nothing: the server keeps no state of connections."""

    def fail(self, transfer: OpenFetch, error: KvferryError) -> None:
        """Do nothing: the server has no transfers; the ships that answer a fetch belong to the sender."""

    def closed(self, transfer: OpenFetch) -> None:
        """Do nothing: the server has no transfers."""

    def overdue(self, transfer: OpenFetch) -> None:
        """Do nothing: the server has no transfers."""


def split(hashes: bytes) -> list[bytes]:
    """Return the hashes of a fetch, which carries them concatenated."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
