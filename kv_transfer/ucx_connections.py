"""Connections of a UCX link by peer: dialling, keep-alive, loss and close (handshakes: ucx_handshakes).

The kernel reports the end of a peer's process at once, but not a frozen process or a cut cable. So both ends send ALIVE
frames, and a peer is lost after `silence_limit` seconds of silence. After a loss some UCX requests never complete, so
the link itself fails the operations. Only after `disconnect`, which forces the endpoint closed, is memory quiet (not
written any more): on tcp and shared memory the receiving process itself writes (ucx_abandoned_connections)."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass

from kvferry.kv_transfer.control_stream import ALIVE
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.kv_transfer.link import LinkHandler, Peer
from kvferry.kv_transfer.ucx_handshakes import UcxHandshakes
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.kv_transfer.ucx_loop import UcxLoop
from kvferry.kv_transfer.ucx_peer import UcxPeer
from kvferry.kv_transfer.ucx_traffic import UcxTraffic, guarded
from kvferry.protocol.errors import Incompatible, KvferryError, NodeLost
from kvferry.protocol.wire import WireError
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)
CONNECT_TRIES = 3
"""Number of attempts to connect."""
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """Timeouts of a link's connections, in seconds.

    ping_interval    time between ALIVE frames
    silence_limit    time of silence after which a peer counts as lost
    connect_timeout  maximum time of an attempt to connect
    """

    ping_interval: float
    silence_limit: float
    connect_timeout: float


class UcxConnections:
    """Connections of one link. Runs on the link thread; `dial` may be called from any thread."""

    def __init__(self, library: UcxLibrary, loop: UcxLoop, timeouts: ConnectionTimeouts, terms: HandshakeTerms):
        self._library, self._loop, self._timeouts, self._terms = library, loop, timeouts, terms
        self._handshakes = UcxHandshakes(loop, timeouts.connect_timeout, self._arrived, self._fail)
        self.traffic = UcxTraffic(loop, self._handshakes.handle, self._fail)
        self._handshakes.traffic = self.traffic
        self._peers: dict[Peer, UcxPeer] = {}
        self._serial = itertools.count(1)
        self._dropped = RateLimitedLog(log)
        self._handler: LinkHandler

    def listen(self, host: str, port: int, handler: LinkHandler) -> int:
        """Start accepting connections at the host's addresses; return the bound port. Raises OSError."""
        self._handler = self.traffic.handler = handler
        self._ticked_at = time.monotonic()
        self._loop.call_later(self._timeouts.ping_interval, self._tick)
        return self._handshakes.listen(host, port)

    def find(self, name: Peer) -> UcxPeer | None:
        """Return the connection, or None if it is unknown or lost."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def dial(self, address: str) -> Peer:
        """Start connecting to the address; return the connection's name."""
        peer = self._named(f"{address}#{next(self._serial)}", address)
        self._loop.submit(lambda: self._dial(peer))
        return peer.name

    def disconnect(self, name: Peer) -> None:
        """Force a connection closed. On return its memory is quiet; its operations end with an error."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.lost = True
        self._handshakes.forget(peer)
        error = NodeLost(f"{name}: disconnected")
        for done in peer.abandon():
            self._loop.submit(lambda done=done: done(error))  # type: ignore[misc]
        peer.close()

    def close(self) -> None:
        """Lose and close every connection."""
        self._handshakes.close()
        for peer in tuple(self._peers.values()):
            self._lose(peer, NodeLost(f"{peer.name}: link stopped"))
        for name in tuple(self._peers):
            self.disconnect(name)

    def _named(self, name: str, dialled: str = "") -> UcxPeer:
        peer = UcxPeer(name, self._library, self._loop, self._terms, time.monotonic(), dialled)
        self._peers[name] = peer
        return peer

    def _arrived(self) -> UcxPeer:
        return self._named(f"accepted#{next(self._serial)}")

    def _dial(self, peer: UcxPeer) -> None:
        if not peer.lost:
            peer.tries += 1
            self._handshakes.dial(peer)

    # Loss and close.

    def _tick(self) -> None:
        """Send ALIVE frames and lose silent peers. Time during which this process itself was stopped does not count."""
        interval, limit = self._timeouts.ping_interval, self._timeouts.silence_limit
        self._loop.call_later(interval, self._tick)
        now = time.monotonic()
        stall = max(0.0, now - self._ticked_at - 2 * interval)
        self._ticked_at = now
        for peer in tuple(self._peers.values()):
            peer.received_at += stall
            silence = now - peer.received_at
            if not peer.open or peer.lost:
                continue
            if silence > limit:
                self._lose(peer, NodeLost(f"{peer.name}: silent for {silence:.1f} s"))
            else:
                self.traffic.send(peer, ALIVE)

    def _fail(self, peer: UcxPeer, error: Exception) -> None:
        """Retry a dialled connection that was never open and has attempts left; otherwise lose the peer."""
        if peer.lost:
            return
        dialling, permanent = bool(peer.dialled) and not peer.open, isinstance(error, Incompatible)
        if dialling and peer.tries < CONNECT_TRIES and not permanent:
            peer.close()
            peer.begin()
            self._loop.call_later(RETRY_S, lambda: self._dial(peer))
        elif dialling and not permanent:
            self._lose(peer, NodeLost(f"cannot reach {peer.dialled}: {error}"))
        else:
            self._lose(peer, error if isinstance(error, KvferryError) else NodeLost(f"{peer.name}: {error}"))

    def _lose(self, peer: UcxPeer, error: KvferryError) -> None:
        if peer.lost:
            return
        peer.lost = True
        if isinstance(error, WireError):
            self._dropped.warning("closing the connection to %s: %s", peer.name, error)
        peer.close_socket()
        for done in peer.abandon():
            guarded(done, error)
        if peer.open or peer.dialled:
            guarded(self._handler.peer_lost, peer.name, error)
        else:
            self.disconnect(peer.name)
