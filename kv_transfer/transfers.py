"""Table of the transfers in flight of a sender, receiver or fetch client, by key and by connection, with deadlines."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from kvferry.kv_transfer.link import Peer


class Transfer(Protocol):
    """A ship, grant or fetch in flight. Its deadline may change at any time."""

    @property
    def key(self) -> Hashable:
        """Return the key of the transfer in its table."""
        ...

    @property
    def peer(self) -> Peer:
        """Return the connection that the transfer uses."""
        ...

    @property
    def deadline(self) -> float:
        """Return the deadline, in seconds of the link thread's clock."""
        ...


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """Table of transfers. It calls `watch` for each transfer that is added."""

    def __init__(self, watch: Callable[[], None]):
        self._watch = watch
        self._all: dict[Hashable, T] = {}
        self._by_peer: dict[Peer, dict[Hashable, T]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, key: Hashable) -> T | None:
        """Return the transfer with this key, or None."""
        return self._all.get(key)

    def of(self, peer: Peer) -> tuple[T, ...]:
        """Return the transfers on this connection, oldest first."""
        return tuple(self._by_peer.get(peer, {}).values())

    def late(self, now: float) -> list[T]:
        """Return the transfers whose deadline has passed."""
        return [transfer for transfer in self._all.values() if transfer.deadline < now]

    def add(self, transfer: T) -> None:
        """Add a transfer and call `watch`."""
        self._all[transfer.key] = transfer
        self._by_peer.setdefault(transfer.peer, {})[transfer.key] = transfer
        self._watch()

    def remove(self, transfer: T) -> None:
        """Remove a transfer; do nothing if it is not in the table."""
        self._all.pop(transfer.key, None)
        others = self._by_peer.get(transfer.peer, {})
        others.pop(transfer.key, None)
        if not others:
            self._by_peer.pop(transfer.peer, None)
