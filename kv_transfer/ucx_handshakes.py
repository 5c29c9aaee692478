"""Connection set-up of a UCX link: dials and accepts sockets, and runs handshakes until both ends are open.

Anyone may connect to the port. Until a peer has proved that it belongs to the cluster, it costs a socket and a few
bytes: no UCX worker, and no memory of a size that it chooses. At most MAX_PENDING such peers exist; a new one evicts
the oldest, and none stays longer than the connect timeout."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry.kv_transfer.control_stream import CHALLENGE, HELLO, REFUSED, WELCOME, Stream
from kvferry.kv_transfer.listening_sockets import Address, Resolver, listeners
from kvferry.kv_transfer.tags import WARM_TAG
from kvferry.kv_transfer.ucx_blocks import Post
from kvferry.kv_transfer.ucx_loop import READABLE, UcxLoop
from kvferry.kv_transfer.ucx_peer import UcxPeer
from kvferry.kv_transfer.ucx_traffic import UcxTraffic
from kvferry.protocol.errors import Incompatible, NodeLost, TransferFailed
from kvferry.protocol.wire import WireError
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)
WARM_BYTES = 1 << 19
"""Size of the block that warms up a connection."""
MAX_PENDING = 64
"""Maximum number of connections that have not completed their handshake."""
ACCEPTS = 16
"""Maximum number of connections accepted in one turn."""
ACCEPT_RETRY_S = 0.1
"""Pause before connections are accepted again, in seconds, when the process is out of descriptors."""
NEVER, LATER = b"n", b"l"
"""First byte of a REFUSED: NEVER if another attempt is useless, LATER if it may succeed."""


class UcxHandshakes:
    """Handshakes of one link. Runs on the link thread.

    arrived()            creates the peer for an accepted socket
    failed(peer, error)  called when a connection fails or is refused
    """

    def __init__(
        self,
        loop: UcxLoop,
        timeout_s: float,
        arrived: Callable[[], UcxPeer],
        failed: Callable[[UcxPeer, Exception], None],
    ):
        self._loop, self._timeout_s, self._arrived, self._failed = loop, timeout_s, arrived, failed
        self._resolver = Resolver(loop.submit)
        self._listeners: list[socket.socket] = []
        self._pending: dict[UcxPeer, None] = {}
        self._warm = np.zeros(WARM_BYTES, dtype=np.uint8)
        self._refused, self._full = RateLimitedLog(log), RateLimitedLog(log)
        self.traffic: UcxTraffic

    def listen(self, host: str, port: int) -> int:
        """Start accepting connections at the host's addresses; return the bound port. Raises OSError."""
        self._listeners = listeners(host, port)
        self._watch_listeners()
        return int(self._listeners[0].getsockname()[1])

    def close(self) -> None:
        """Close the listening sockets."""
        for listener in self._listeners:
            self._loop.unwatch(listener.fileno())
            listener.close()
        self._listeners = []

    def dial(self, peer: UcxPeer) -> None:
        """Make one attempt to connect, limited by the connect timeout."""
        peer.begin()
        handshake = peer.handshake

        def due(error: Exception) -> None:
            if peer.handshake is handshake and not peer.open and not peer.lost:
                self._failed(peer, error)

        def found(family: socket.AddressFamily, address: Address) -> None:
            if peer.handshake is handshake and not peer.lost:
                self._connect(peer, family, address)

        limit = NodeLost(f"no answer within {self._timeout_s} s")
        self._loop.call_later(self._timeout_s, lambda: due(limit))
        try:
            self._resolver.resolve(peer.dialled, found, due)
        except ValueError as error:
            due(error)

    def _connect(self, peer: UcxPeer, family: socket.AddressFamily, address: Address) -> None:
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._failed(peer, error)
            return
        connection.setblocking(False)
        code = connection.connect_ex(address)
        stream = Stream(connection)
        try:
            stream.connecting(code)
        except OSError as error:
            stream.close()
            self._failed(peer, error)
        else:
            self.traffic.connect(peer, stream)

    def _watch_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.watch(listener.fileno(), READABLE, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, events: int) -> bool:
        for _ in range(ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                self._full.warning("connections cannot be accepted: %s", error)
                self._loop.unwatch(listener.fileno())
                self._loop.call_later(ACCEPT_RETRY_S, self._watch_listeners)
                break
            self._receive(connection)
        return True

    def _receive(self, connection: socket.socket) -> None:
        """Challenge the peer of an accepted socket."""
        if len(self._pending) >= MAX_PENDING:
            self._failed(next(iter(self._pending)), NodeLost("too many connections without a handshake"))
        peer = self._arrived()
        self._pending[peer] = None
        self.traffic.connect(peer, Stream(connection))
        self.traffic.send(peer, CHALLENGE, peer.handshake.challenge())
        late = NodeLost(f"no handshake within {self._timeout_s} s")
        self._loop.call_later(self._timeout_s, lambda: self._failed(peer, late) if peer in self._pending else None)

    def forget(self, peer: UcxPeer) -> None:
        """Remove the peer from those without a handshake: it authenticated or its connection ended."""
        self._pending.pop(peer, None)

    def handle(self, peer: UcxPeer, kind: int, data: bytes) -> None:
        """Handle a frame of the handshake.

        Raises WireError, Incompatible, TransferFailed or NodeLost: the connection is then unusable."""
        if kind == HELLO and not peer.dialled and peer.worker is None:
            self._take_hello(peer, data)
        elif kind == CHALLENGE and peer.dialled and peer.worker is None:
            peer.handshake.read_challenge(data)
            self.traffic.send(peer, HELLO, peer.handshake.hello(self._open_worker(peer)))
        elif kind == WELCOME and peer.dialled and peer.worker is not None and not peer.open:
            peer.handshake.read_welcome(data)
            self._open(peer)
            self.traffic.send_queued(peer)
            self.traffic.post(peer, Post(True, WARM_TAG, self._warm, _warmed))
        elif kind == REFUSED and peer.dialled and not peer.open:
            reason = data[1:].decode(errors="replace")
            raise (Incompatible if data[:1] == NEVER else NodeLost)(f"{peer.dialled} rejected this node: {reason}")
        else:
            raise WireError("an unexpected frame of the handshake")

    def _take_hello(self, peer: UcxPeer, data: bytes) -> None:
        """Verify the dialling side and welcome it.

        Also post the receive of the warm-up block, since the first large block of a connection takes 45–90 ms."""
        try:
            peer.handshake.read_hello(data)
            welcome = peer.handshake.welcome(self._open_worker(peer))
            self.traffic.send(peer, WELCOME, welcome)
            self._open(peer)
        except (Incompatible, TransferFailed) as error:
            self._refused.warning("rejecting the connection of %s: %s", peer.name, error)
            code = NEVER if isinstance(error, Incompatible) else LATER
            self.traffic.send(peer, REFUSED, code + error.message.encode()[:500])
            raise
        self.forget(peer)
        self.traffic.post(peer, Post(False, WARM_TAG, self._warm, _warmed))

    def _open_worker(self, peer: UcxPeer) -> bytes:
        """Open the peer's UCX worker and return its address. Raises TransferFailed."""

        def poll(progressed: bool) -> bool:
            return self.traffic.poll(peer, progressed)

        peer.worker = self._loop.open_worker(poll, lambda error: self._failed(peer, error))
        return peer.worker.address

    def _open(self, peer: UcxPeer) -> None:
        """Open the connection of an authenticated peer. Raises TransferFailed, NodeLost."""
        worker, stream = peer.worker, peer.stream
        if worker is None or stream is None:
            raise NodeLost("the connection closed during the handshake")

        def closed() -> None:
            self._loop.submit(lambda: self._closed(peer, worker))

        peer.blocks.endpoint = worker.attach(peer.handshake.peer, closed)
        stream.seal(*peer.handshake.keys())
        peer.open = True

    def _closed(self, peer: UcxPeer, worker: object) -> None:
        """Fail a peer whose endpoint UCX closed."""
        if peer.worker is worker and not peer.lost:
            self.traffic.drain(peer)
            self._failed(peer, NodeLost("connection closed by the peer"))


def _warmed(error: Exception | None) -> None:
    """Ignore the end of the warm-up transfer; an error also shows as the loss of the peer."""
