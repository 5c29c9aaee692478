"""The transfers of one side of a link: by peer, with their deadlines, and the closing of a peer with all of them. The
same for who sends and who receives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.control import read
from kv_transfer.link import Link, Peer
from protocol.errors import KvferryError, TransferFailed
from protocol.wire import WireError

log = logging.getLogger(__name__)
SWEEP_S = 0.25
QUIESCE_TIMEOUT_S = 10.0
"""What the operations of a transfer that ended may take to complete before their connection is closed."""


class Transfer(Protocol):
    """A ship or a grant. `deadline`, in the clock's seconds, may move at any time."""

    @property
    def key(self) -> Hashable: ...

    @property
    def peer(self) -> Peer: ...

    @property
    def deadline(self) -> float: ...


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """Closing an endpoint is the only way to end an operation whose other side may not answer, and it ends every
    transfer on it: `drop` fails them all at once and reports each quiet when the memory is.

    forget(peer)           the connection is being closed: a later one is another
    fail(transfer, error)  its connection is being closed
    quiet(transfer)        the connection is closed: nothing touches its memory any more
    overdue(transfer)      its deadline passed; called at every sweep until it moves
    """

    def __init__(
        self,
        link: Link,
        clock: Callable[[], float],
        *,
        forget: Callable[[Peer], None],
        fail: Callable[[T, KvferryError], None],
        quiet: Callable[[T], None],
        overdue: Callable[[T], None],
    ):
        self._link, self._clock = link, clock
        self._forget, self._fail, self._quiet, self._overdue = forget, fail, quiet, overdue
        self._all: dict[Hashable, T] = {}
        self._by_peer: dict[Peer, dict[Hashable, T]] = {}
        self._closing: set[Peer] = set()
        self._sweeping = False

    def __len__(self) -> int:
        return len(self._all)

    def find(self, key: Hashable) -> T | None:
        return self._all.get(key)

    def add(self, transfer: T) -> None:
        self._all[transfer.key] = transfer
        self._by_peer.setdefault(transfer.peer, {})[transfer.key] = transfer
        self._watch()

    def remove(self, transfer: T) -> None:
        self._all.pop(transfer.key, None)
        others = self._by_peer.get(transfer.peer, {})
        others.pop(transfer.key, None)
        if not others:
            self._by_peer.pop(transfer.peer, None)

    def is_closing(self, peer: Peer) -> bool:
        return peer in self._closing

    def read(self, peer: Peer, data: bytes, expected: Any) -> Any:
        """The message, which is an `expected`; None from a peer that is being closed, or now is for what it sent."""
        if peer in self._closing:
            return None
        try:
            return read(data, expected)
        except WireError as error:
            log.warning("%s is dropped: %s", peer, error)
            self.drop(peer, error)
            return None

    def drop(self, peer: Peer, error: Exception) -> None:
        """Close the connection, once; every transfer on it fails now and is quiet when the link says so."""
        if peer in self._closing:
            return
        self._closing.add(peer)
        self._forget(peer)
        if not isinstance(error, KvferryError) or isinstance(error, WireError):
            error = TransferFailed(f"{peer}: {error}")
        for transfer in tuple(self._by_peer.get(peer, {}).values()):
            self._fail(transfer, error)

        def closed() -> None:
            for transfer in tuple(self._by_peer.get(peer, {}).values()):
                self._quiet(transfer)
            self._closing.discard(peer)

        self._link.disconnect(peer, closed)

    def _watch(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._link.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """The next one is set first: no error may end the watch over all deadlines."""
        now = self._clock()
        late = [transfer for transfer in self._all.values() if transfer.deadline < now]
        self._sweeping = False
        if self._all:
            self._watch()
        for transfer in late:
            self._overdue(transfer)
