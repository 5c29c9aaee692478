"""Dock: the single handler of a node's link, which passes each message to the sender, receiver or fetch endpoint.

Endpoints are the sender, receiver, fetch client and fetch server. The dock routes messages to them by class, checks the
deadlines of their transfers in one periodic sweep, and fails their transfers when a connection closes. A node's role
decides which endpoints it mounts. Memory is quiet once no operation can touch it any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvferry.kv_transfer.block_path import BlockPath
from kvferry.kv_transfer.checksum import Checksums, InlineChecksums
from kvferry.kv_transfer.control_validation import read
from kvferry.kv_transfer.link import Link, Peer
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.send_window import SendWindow
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol.errors import KvferryError, TransferFailed
from kvferry.protocol.process_names import NOBODY, NodeName
from kvferry.protocol.wire import WireError, pack

log = logging.getLogger(__name__)
SWEEP_S = 0.25
"""Seconds between two sweeps over the deadlines."""
QUIESCE_TIMEOUT_S = 10.0
"""Seconds without progress after which the dock closes the connection of an ended transfer's operations."""


class Endpoint(Protocol):
    """One kind of traffic on a dock. All calls come on the link thread."""

    @property
    def takes(self) -> tuple[type, ...]:
        """Return the message classes that this endpoint handles; no two endpoints of a dock share one."""

    @property
    def transfers(self) -> Transfers[Any]:
        """Return the transfers in flight."""

    def take(self, peer: Peer, message: Any) -> None:
        """Handle a message of one of its classes; its fields are already validated."""

    def forget(self, peer: Peer) -> None:
        """Drop the state kept for a connection that is being closed; a new connection gets a new peer."""

    def fail(self, transfer: Any, error: KvferryError) -> None:
        """Fail a transfer whose connection is being closed."""

    def closed(self, transfer: Any) -> None:
        """End a transfer whose connection is closed: nothing touches its memory any more."""

    def overdue(self, transfer: Any) -> None:
        """Handle a passed deadline. Called at every sweep until the deadline moves."""


class Dock:
    """Handler of a node's link that routes messages to mounted endpoints. Implements kv_transfer.link.LinkHandler.

    `submit` may be called from any thread, `mount`, `start` and `stop` by the dock's owner. Everything else runs on the
    link thread.

    name       name of this node, which its peers receive
    path       link, memory, checksums and send window of all blocks
    verify     share of blocks, 0 to 1, whose checksum is taken
    checksums  by default those for blocks in host memory
    window     limit of bytes in flight
    clock      monotonic seconds
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
        self._established: set[Peer] = set()
        self._sweeping = False

    def mount(self, endpoint: Endpoint) -> None:
        """Add an endpoint. Call it before `start`."""
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
        """Run `call` on the link thread soon."""
        self.link.submit(call)

    def dial(self, address: str) -> Peer:
        """Return the connection to the address, which all endpoints share; connect if there is none."""
        return self._dialled.peer(address)

    def send(self, peer: Peer, message: Any) -> None:
        """Send a control message to the peer."""
        self.link.send(peer, pack(message))

    def is_closing(self, peer: Peer) -> bool:
        """Return whether the connection is being closed."""
        return peer in self._closing

    def is_established(self, peer: Peer) -> bool:
        """Return whether this connection is still open and has received a message."""
        return peer in self._established

    def drop(self, peer: Peer, error: Exception) -> None:
        """Close the connection and fail all its transfers now; their memory is quiet once the link reports the close.

        Repeated calls do nothing. Only closing the connection ends an operation whose other side may never answer."""
        if peer in self._closing:
            return
        self._closing.add(peer)
        self._established.discard(peer)
        self._dialled.forget(peer)
        if not isinstance(error, KvferryError) or isinstance(error, WireError):
            error = TransferFailed(f"{peer}: {error}")
        for endpoint in self._endpoints:
            endpoint.forget(peer)
            for transfer in endpoint.transfers.of(peer):
                endpoint.fail(transfer, error)
        self.link.disconnect(peer, lambda: self._closed(peer))

    def watch(self) -> None:
        """Sweep over all deadlines until no transfer is left. Called for each transfer that is added."""
        if not self._sweeping:
            self._sweeping = True
            self.link.call_later(SWEEP_S, self._sweep)

    # Calls of the link.

    def message(self, peer: Peer, data: bytes) -> None:
        """Pass a control message to its endpoint; close the connection if the message is invalid or unexpected."""
        if peer in self._closing:
            return
        try:
            message = read(data, tuple(self._routes))
        except WireError as error:
            log.warning("closing the connection to %s: %s", peer, error)
            self.drop(peer, error)
            return
        self._established.add(peer)
        self._routes[message.__class__].take(peer, message)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self.drop(peer, error)

    def _closed(self, peer: Peer) -> None:
        for endpoint in self._endpoints:
            for transfer in endpoint.transfers.of(peer):
                endpoint.closed(transfer)
        self._closing.discard(peer)

    def _sweep(self) -> None:
        """Call `overdue` for every transfer past its deadline.

        Schedules the next sweep first, so that an endpoint's error cannot stop the sweeps."""
        now = self.clock()
        late = [(endpoint, transfer) for endpoint in self._endpoints for transfer in endpoint.transfers.late(now)]
        self._sweeping = False
        if any(endpoint.transfers for endpoint in self._endpoints):
            self.watch()
        for endpoint, transfer in late:
            endpoint.overdue(transfer)


class OutboundConnections:
    """Outbound connections by address. Runs on the link thread."""

    def __init__(self, link: Link):
        self._link = link
        self._peers: dict[str, Peer] = {}

    def peer(self, address: str) -> Peer:
        """Return the connection to the address; connect if there is none."""
        if address not in self._peers:
            self._peers[address] = self._link.connect(address)
        return self._peers[address]

    def forget(self, peer: Peer) -> None:
        """Forget a connection that is lost or being closed."""
        for address in [a for a, known in self._peers.items() if known == peer]:
            del self._peers[address]
