"""Which transfers ride on which peer, and the closing of a peer with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kv_transfer.link import Link, Peer

Rider = TypeVar("Rider")


class Peers(Generic[Rider]):
    """Closing an endpoint is the only way to end an operation whose other side may not answer, and it ends every
    transfer on it: `drop` fails them all at once and reports each quiet when the memory is."""

    def __init__(self, link: Link):
        self._link = link
        self._riders: dict[Peer, dict[int, Rider]] = {}
        self._closing: set[Peer] = set()

    def add(self, peer: Peer, transfer: int, rider: Rider) -> None:
        self._riders.setdefault(peer, {})[transfer] = rider

    def remove(self, peer: Peer, transfer: int) -> None:
        riders = self._riders.get(peer, {})
        riders.pop(transfer, None)
        if not riders:
            self._riders.pop(peer, None)

    def is_closing(self, peer: Peer) -> bool:
        return peer in self._closing

    def drop(self, peer: Peer, fail: Callable[[Rider], None], quiet: Callable[[Rider], None]) -> None:
        """Close the peer once: fail(rider) for each now, quiet(rider) for those left when memory is quiet."""
        if peer in self._closing:
            return
        self._closing.add(peer)
        for rider in tuple(self._riders.get(peer, {}).values()):
            fail(rider)

        def closed() -> None:
            for rider in tuple(self._riders.get(peer, {}).values()):
                quiet(rider)
            self._closing.discard(peer)

        self._link.disconnect(peer, closed)
