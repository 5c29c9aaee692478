"""Connections of a UCX link by peer: keep-alive, loss and close (set-up: ucx_handshakes).

The kernel tells at once when a peer's process ends, but nobody tells of a frozen one or a cut cable, so both ends send
ALIVE frames; silence beyond `silence_limit` loses the peer. After a loss some requests of UCX never complete by
themselves, so the link fails the operations; only `disconnect` makes memory quiet, by forcing the endpoint closed.
Closing keeps memory safe because on tcp and shared memory the receiving process does the writing itself
(ucx_abandoned_connections).
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass

from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.kv_transfer.link import LinkHandler, Peer
from kvferry.kv_transfer.stream import ALIVE
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
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """Seconds between ALIVE frames, without any sign of a peer until it is lost, and per try to connect."""

    ping_interval: float
    silence_limit: float
    connect_timeout: float


class UcxConnections:
    """Runs on the link thread, but for `dial`, whose caller may be any of the link's."""

    def __init__(self, library: UcxLibrary, loop: UcxLoop, patience: ConnectionTimeouts, terms: HandshakeTerms):
        self._library, self._loop, self._patience, self._terms = library, loop, patience, terms
        self._greetings = UcxHandshakes(loop, patience.connect_timeout, self._arrived, self._fail)
        self.traffic = UcxTraffic(loop, self._greetings.greeted, self._fail)
        self._greetings.traffic = self.traffic
        self._peers: dict[Peer, UcxPeer] = {}
        self._serial = itertools.count(1)
        self._dropped = RateLimitedLog(log)
        self._handler: LinkHandler

    def listen(self, host: str, port: int, handler: LinkHandler) -> int:
        """Accept connections at the host's addresses from now on; the port that was bound. Raises OSError."""
        self._handler = self.traffic.handler = handler
        self._ticked_at = time.monotonic()
        self._loop.call_later(self._patience.ping_interval, self._tick)
        return self._greetings.listen(host, port)

    def find(self, name: Peer) -> UcxPeer | None:
        """The connection, if it was not lost."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def dial(self, address: str) -> Peer:
        """Begin a connection and give it a name."""
        peer = self._named(f"{address}#{next(self._serial)}", address)
        self._loop.submit(lambda: self._dial(peer))
        return peer.name

    def disconnect(self, name: Peer) -> None:
        """Force a connection closed; its memory is quiet on return, and its operations end with an error."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.lost = True
        self._greetings.forget(peer)
        error = NodeLost(f"{name}: disconnected")
        for done in peer.abandon():
            self._loop.submit(lambda done=done: done(error))  # type: ignore[misc]
        peer.close()

    def close(self) -> None:
        """Lose and close every connection."""
        self._greetings.close()
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
            self._greetings.dial(peer)

    # Ends.

    def _tick(self) -> None:
        """Send ALIVE and judge silence; time during which this process itself stood still counts for nobody."""
        interval, limit = self._patience.ping_interval, self._patience.silence_limit
        self._loop.call_later(interval, self._tick)
        now = time.monotonic()
        stall = max(0.0, now - self._ticked_at - 2 * interval)
        self._ticked_at = now
        for peer in tuple(self._peers.values()):
            peer.heard_at += stall
            silence = now - peer.heard_at
            if not peer.open or peer.lost:
                continue
            if silence > limit:
                self._lose(peer, NodeLost(f"{peer.name}: silent for {silence:.1f} s"))
            else:
                self.traffic.send(peer, ALIVE)

    def _fail(self, peer: UcxPeer, error: Exception) -> None:
        """Dial again where the connection was never open and may yet be, else lose the peer."""
        if peer.lost:
            return
        dialling, hopeless = bool(peer.dialled) and not peer.open, isinstance(error, Incompatible)
        if dialling and peer.tries < CONNECT_TRIES and not hopeless:
            peer.close()
            peer.begin()
            self._loop.call_later(RETRY_S, lambda: self._dial(peer))
        elif dialling and not hopeless:
            self._lose(peer, NodeLost(f"cannot reach {peer.dialled}: {error}"))
        else:
            self._lose(peer, error if isinstance(error, KvferryError) else NodeLost(f"{peer.name}: {error}"))

    def _lose(self, peer: UcxPeer, error: KvferryError) -> None:
        if peer.lost:
            return
        peer.lost = True
        if isinstance(error, WireError):
            self._dropped.warning("%s is dropped: %s", peer.name, error)
        peer.hang_up()
        for done in peer.abandon():
            guarded(done, error)
        if peer.open or peer.dialled:
            guarded(self._handler.peer_lost, peer.name, error)
        else:
            self.disconnect(peer.name)
