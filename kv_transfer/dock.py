"""Dock: the single handler of a node's link, which dispatches messages to senders and receivers.

Endpoints are mounted on it (a sender, a receiver): messages go to them by class, their transfers are watched by one
sweep, and a connection that is closed ends what all of them have on it. What a node is to others is which endpoints
it mounts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvferry.kv_transfer.block_path import BlockPath
from kvferry.kv_transfer.checksum import Checksums, InlineChecksums
from kvferry.kv_transfer.control_validation import read
from kvferry.kv_transfer.link import Link, Peer
from kvferry.kv_transfer.outbound_connections import OutboundConnections
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.send_window import SendWindow
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol.errors import KvferryError, TransferFailed
from kvferry.protocol.process_names import NOBODY, NodeName
from kvferry.protocol.wire import WireError, pack

log = logging.getLogger(__name__)
SWEEP_S = 0.25
QUIESCE_TIMEOUT_S = 10.0
"""How long none of the operations of a transfer that ended may complete before their connection is closed."""


class Endpoint(Protocol):
    """One kind of traffic. All calls come on the link thread."""

    @property
    def takes(self) -> tuple[type, ...]:
        """Classes of the messages that it understands; no two endpoints of a dock share one."""

    @property
    def transfers(self) -> Transfers[Any]:
        """Return the transfers in flight."""

    def take(self, peer: Peer, message: Any) -> None:
        """A message of its classes came; its fields are checked."""

    def forget(self, peer: Peer) -> None:
        """The connection is being closed: a later one is another."""

    def fail(self, transfer: Any, error: KvferryError) -> None:
        """Its connection is being closed."""

    def closed(self, transfer: Any) -> None:
        """Its connection is closed: nothing touches its memory any more."""

    def overdue(self, transfer: Any) -> None:
        """Its deadline passed; called at every sweep until that moves."""


class Dock:
    """Implements kv_transfer.link.LinkHandler.

    `submit` may be called from any thread; what begins and ends a node's life (`mount`, `start`, `stop`) by its owner;
    everything else on the link thread.

    name       of this node, as it tells its peers
    path       what blocks need on their way: link, memory, checksums, window
    verify     share of blocks, 0 to 1, whose checksum is taken here
    checksums  by default those of blocks in the machine's memory
    window     how much may be on its way at once; clock: monotonic seconds
    """

    def __init__(
        self,
        link: Link,
        memory: BlockMemory,
        *,
        name: NodeName = NOBODY,
        verify: float = 1.0,
        checksums: Checksums | None = None,
        window: SendWindow | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.link, self.name, self.clock = link, name, clock
        self.path = BlockPath(link, memory, checksums or InlineChecksums(), verify, window or SendWindow(), clock)
        self._endpoints: list[Endpoint] = []
        self._routes: dict[type, Endpoint] = {}
        self._dialled = OutboundConnections(link)
        self._closing: set[Peer] = set()
        self._heard: set[Peer] = set()
        self._sweeping = False

    def mount(self, endpoint: Endpoint) -> None:
        """Before `start`."""
        shared = self._routes.keys() & set(endpoint.takes)
        assert not shared, f"two endpoints take {shared}"
        self._routes.update(dict.fromkeys(endpoint.takes, endpoint))
        self._endpoints.append(endpoint)

    def start(self) -> None:
        """Open the link. Raises ConfigError naming the remedy."""
        self.link.start(self)

    def stop(self) -> None:
        """Close every connection; all transfers on them fail."""
        self.link.stop()

    def submit(self, call: Callable[[], None]) -> None:
        """Run on the link thread soon."""
        self.link.submit(call)

    def dial(self, address: str) -> Peer:
        """The connection to the address, begun now if there is none: all endpoints share it."""
        return self._dialled.peer(address)

    def send(self, peer: Peer, message: Any) -> None:
        self.link.send(peer, pack(message))

    def is_closing(self, peer: Peer) -> bool:
        return peer in self._closing

    def hears(self, peer: Peer) -> bool:
        """Return whether a message came from it, on a connection that still is one."""
        return peer in self._heard

    def drop(self, peer: Peer, error: Exception) -> None:
        """Close the connection, once: the only way to end an operation whose other side may not answer, and it ends
        every transfer on it. They fail now and are quiet when the link says so."""
        if peer in self._closing:
            return
        self._closing.add(peer)
        self._heard.discard(peer)
        self._dialled.forget(peer)
        if not isinstance(error, KvferryError) or isinstance(error, WireError):
            error = TransferFailed(f"{peer}: {error}")
        for endpoint in self._endpoints:
            endpoint.forget(peer)
            for transfer in endpoint.transfers.of(peer):
                endpoint.fail(transfer, error)
        self.link.disconnect(peer, lambda: self._closed(peer))

    def watch(self) -> None:
        """A transfer was added: sweep over all deadlines until none is left."""
        if not self._sweeping:
            self._sweeping = True
            self.link.call_later(SWEEP_S, self._sweep)

    # What the link calls.

    def message(self, peer: Peer, data: bytes) -> None:
        """Handle a control message; an unexpected one costs the peer its connection."""
        if peer in self._closing:
            return
        try:
            message = read(data, tuple(self._routes))
        except WireError as error:
            log.warning("%s is dropped: %s", peer, error)
            self.drop(peer, error)
            return
        self._heard.add(peer)
        self._routes[message.__class__].take(peer, message)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self.drop(peer, error)

    def _closed(self, peer: Peer) -> None:
        for endpoint in self._endpoints:
            for transfer in endpoint.transfers.of(peer):
                endpoint.closed(transfer)
        self._closing.discard(peer)

    def _sweep(self) -> None:
        """The next one is set first: no error may end the watch over all deadlines."""
        now = self.clock()
        late = [(endpoint, transfer) for endpoint in self._endpoints for transfer in endpoint.transfers.late(now)]
        self._sweeping = False
        if any(endpoint.transfers for endpoint in self._endpoints):
            self.watch()
        for endpoint, transfer in late:
            endpoint.overdue(transfer)
