"""Fetch protocol between nodes: the request for blocks and the answer where the peer has none.

The blocks themselves travel as a ship: the holder asks for a grant on the connection on which it was asked.

A fetch has a deadline of its own and is asked once: anyone who asks can do without.
"""

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
from kvferry.protocol.link_messages import Fetch, NoSupply, Supply
from kvferry.protocol.messages import DecodeTarget


class FetchEvents(Protocol):
    """Anyone who asks. On the link thread."""

    def unsupplied(self, fetch: int, error: KvferryError) -> None:
        """Report that no more blocks come; not called for a fetch that was given up, or whose grant ended."""


@dataclass(slots=True, eq=False)
class OpenFetch:
    """One that is awaited. grant: by which its blocks come, once who holds them asked for it; deadline: of all."""

    fetch: int
    peer: Peer
    deadline: float
    grant: TransferKey | None = None

    @property
    def key(self) -> int:
        return self.fetch


class FetchClient:
    """Asks other nodes, as an endpoint of a dock.

    `ask` and `give_up` may be called from any thread, everything else on the link thread.

    cancel  gives a grant up that is open: its end is told by the receiver
    """

    takes = (NoSupply,)

    def __init__(self, dock: Dock, events: FetchEvents, cancel: Callable[[TransferKey, KvferryError], None]) -> None:
        self._dock, self._events, self._cancel = dock, events, cancel
        self._numbers = itertools.count(1)
        self._by_grant: dict[TransferKey, OpenFetch] = {}
        self.transfers: Transfers[OpenFetch] = Transfers(dock.watch)
        dock.mount(self)

    def ask(self, holder: str, asker: DecodeTarget, first: int, hashes: Sequence[bytes], patience_s: float) -> int:
        """Ask the node at that link address for the blocks behind the `first` ones, all in `patience_s` seconds; the
        fetch's number is returned."""
        number = next(self._numbers)
        fetch = Fetch(number, asker, first, b"".join(hashes), patience_s)
        self._dock.submit(lambda: self._ask(holder, fetch))
        return number

    def give_up(self, number: int) -> None:
        """Abandon a fetch that nothing waits for any more."""
        self._dock.submit(lambda: self._give_up(number))

    def supplied(self, key: TransferKey, supply: Supply) -> bool:
        """A grant is asked for its blocks. Whether they are awaited, and come by no other grant."""
        fetch = self.transfers.find(supply.fetch)
        if fetch is None or fetch.grant is not None or fetch.peer != key[0]:
            return False
        fetch.grant = key
        self._by_grant[key] = fetch
        return True

    def ended(self, key: TransferKey) -> int | None:
        """The grant came to its end, or was refused here, and so does its fetch: its number, if it was awaited."""
        fetch = self._by_grant.get(key)
        if fetch is None:
            return None
        self._forget(fetch)
        return fetch.fetch

    # What comes from the dock.

    def take(self, peer: Peer, message: NoSupply) -> None:
        fetch = self.transfers.find(message.transfer)
        if fetch is not None and fetch.peer == peer and fetch.grant is None:
            self.fail(fetch, errors.from_body({"error": {"code": message.code, "message": message.message}}))

    def forget(self, peer: Peer) -> None:
        """Drop a connection's fetches."""

    def fail(self, fetch: OpenFetch, error: KvferryError) -> None:
        self._forget(fetch)
        self._events.unsupplied(fetch.fetch, error)

    def closed(self, fetch: OpenFetch) -> None:
        """It ended as its connection began to be closed."""

    def overdue(self, fetch: OpenFetch) -> None:
        error = DeadlineExceeded("the blocks did not come in time")
        if fetch.grant is not None:
            self._cancel(fetch.grant, error)
        else:
            self.fail(fetch, error)

    def _ask(self, holder: str, fetch: Fetch) -> None:
        peer = self._dock.dial(holder)
        self.transfers.add(OpenFetch(fetch.transfer, peer, self._dock.clock() + fetch.deadline_s))
        self._dock.send(peer, fetch)

    def _give_up(self, number: int) -> None:
        fetch = self.transfers.find(number)
        if fetch is not None:
            self._forget(fetch)
            if fetch.grant is not None:
                self._cancel(fetch.grant, Cancelled("nobody waits for the blocks any more"))

    def _forget(self, fetch: OpenFetch) -> None:
        self.transfers.remove(fetch)
        if fetch.grant is not None:
            del self._by_grant[fetch.grant]


class FetchServer:
    """Hears what other nodes ask for, as an endpoint of a dock.

    A question that comes twice is asked twice: the asker refuses what it has no use for. wanted: is told of each, on
    the link thread."""

    takes = (Fetch,)

    def __init__(self, dock: Dock, wanted: Callable[[Peer, Fetch], None]) -> None:
        self._dock, self._wanted = dock, wanted
        self.transfers: Transfers[OpenFetch] = Transfers(dock.watch)
        dock.mount(self)

    def deny(self, peer: Peer, fetch: Fetch, error: KvferryError) -> None:
        """Answer that no blocks come; callable from any thread.

        From any thread."""
        answer = NoSupply(fetch.transfer, error.code, error.message)
        self._dock.submit(lambda: self._dock.send(peer, answer))

    def take(self, peer: Peer, message: Fetch) -> None:
        self._wanted(peer, message)

    def forget(self, peer: Peer) -> None:
        """Do nothing: a server keeps no state of connections."""

    def fail(self, transfer: OpenFetch, error: KvferryError) -> None:
        """It has none: what it sends are the sender's."""

    def closed(self, transfer: OpenFetch) -> None:
        """Nor here."""

    def overdue(self, transfer: OpenFetch) -> None:
        """Nor here."""


def split(hashes: bytes) -> list[bytes]:
    """Split the lists that a fetch carries one behind the other."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
