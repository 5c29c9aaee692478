"""How connections of a UCX link begin and end: dialled or accepted, greeted, heard of, lost, closed.

UCX notices a killed peer in milliseconds (close callback) but never a frozen one or a cut cable, so both ends send
ALIVE frames; silence beyond `silence_limit` loses the peer. After a loss some requests never complete by themselves, so
the link fails the operations; only `disconnect` makes memory quiet, by forcing the endpoint closed. Closing keeps
memory safe because on tcp and shared memory the receiving process does the writing itself.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_transfer.link import LinkHandler, Peer
from kv_transfer.listening import confine
from kv_transfer.tags import MAX_CHANNEL, link_tag
from kv_transfer.ucx_blocks import Post
from kv_transfer.ucx_frames import ALIVE, HELLO
from kv_transfer.ucx_library import UcxLibrary
from kv_transfer.ucx_loop import UcxLoop
from kv_transfer.ucx_peer import WARM, UcxPeer
from kv_transfer.ucx_traffic import UcxTraffic, guarded
from process.address import parse_host_port
from protocol.errors import Incompatible, KvferryError, NodeLost
from protocol.layout import WIRE_VERSION
from protocol.wire import WireError

log = logging.getLogger(__name__)
WARM_BYTES = 1 << 19
CONNECT_TRIES = 3
RETRY_S = 0.2
AFTER_CLOSE_S = 0.002


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds between ALIVE frames, without any sign of a peer until it is lost, and per try to connect."""

    ping_interval: float
    silence_limit: float
    connect_timeout: float


class UcxConnections:
    """Runs on the link thread, but for `dial`, whose caller may be any of the link's."""

    def __init__(self, library: UcxLibrary, loop: UcxLoop, patience: Patience):
        self._library, self._loop, self._patience = library, loop, patience
        self.traffic = UcxTraffic(loop.submit, self._greeted, self._fail)
        self._peers: dict[Peer, UcxPeer] = {}
        self._serial = itertools.count(1)
        self._arrivals: deque[int] = deque()
        self._closures: deque[tuple[Peer, int]] = deque()
        self._warm = np.zeros(WARM_BYTES, dtype=np.uint8)
        self._handler: LinkHandler

    def listen(self, worker: Any, host: str, port: int, handler: LinkHandler) -> int:
        """Accept connections at the host's addresses from now on; the port that was bound."""
        self._worker, self._handler, self.traffic.handler = worker, handler, handler
        self._listener = self._library.api.UCXListener.create(worker, port, self._arrivals.append)
        confine(self._listener.port, host)
        self._ticked_at = time.monotonic()
        self._loop.call_later(self._patience.ping_interval, self._tick)
        return int(self._listener.port)

    def find(self, name: Peer) -> UcxPeer | None:
        """The connection, if it was not lost."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def dial(self, address: str) -> Peer:
        """Begin a connection and give it a name."""
        peer = UcxPeer(f"{address}#{next(self._serial)}", self._library, time.monotonic(), dialled=address)
        self._peers[peer.name] = peer
        self._loop.submit(lambda: self._dial(peer))
        return peer.name

    def disconnect(self, name: Peer) -> None:
        """Force a connection closed; its memory is quiet on return, and its operations end with an error."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.lost = True
        error = NodeLost(f"{name}: disconnected")
        for done in peer.abandon():
            self._loop.submit(lambda done=done: done(error))  # type: ignore[misc]
        peer.close()
        self._progress_for(AFTER_CLOSE_S)

    def poll(self, progressed: bool) -> bool:
        """See to arrivals, closures and the traffic of all; whether there was anything to do."""
        worked = bool(self._arrivals or self._closures)
        while self._arrivals:
            self._accept(self._arrivals.popleft())
        while self._closures:
            self._closed(*self._closures.popleft())
        for peer in tuple(self._peers.values()):
            if progressed:
                peer.blocks.wake()
            if progressed or not peer.blocks.scanned:
                worked |= self.traffic.poll(peer, progressed)
        return worked

    def close(self) -> None:
        """Lose and close every connection."""
        for peer in tuple(self._peers.values()):
            self._lose(peer, NodeLost(f"{peer.name}: link stopped"))
        for name in tuple(self._peers):
            self.disconnect(name)
        self._listener = self._worker = None

    def _progress_for(self, seconds: float) -> None:
        """Let UCX finish what closing an endpoint began; a worker whose endpoints are not done is never freed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._worker.progress()

    # Beginnings.

    def _dial(self, peer: UcxPeer) -> None:
        if peer.lost:
            return
        peer.tries += 1
        try:
            host, port = parse_host_port(peer.dialled)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            endpoint = self._worker.create_endpoint_from_hostname(str(found[0][4][0]), port, True)
            self._attach(peer, endpoint)
            peer.greet(WIRE_VERSION)
        except (OSError, ValueError, NodeLost, self._library.api.UCXError) as error:
            self._fail(peer, error)
            return
        attachment = peer.attachment
        self._loop.call_later(self._patience.connect_timeout, lambda: self._dial_timed_out(peer, attachment))

    def _dial_timed_out(self, peer: UcxPeer, attachment: int) -> None:
        if not peer.open and peer.attachment == attachment:
            self._fail(peer, NodeLost(f"no answer in {self._patience.connect_timeout} s"))

    def _accept(self, request: int) -> None:
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except self._library.api.UCXError as error:
            log.warning("a connection was not accepted: %s", error)
            return
        peer = UcxPeer(f"accepted#{next(self._serial)}", self._library, time.monotonic())
        self._peers[peer.name] = peer
        try:
            self._attach(peer, endpoint)
        except self._library.api.UCXError as error:
            self._fail(peer, error)

    def _attach(self, peer: UcxPeer, endpoint: Any) -> None:
        """Channels are drawn, so that a stranger cannot write into another peer's: UCX matches tags of all peers."""
        taken = {other.attachment for other in self._peers.values()}
        channel = next(c for c in iter(lambda: 1 + secrets.randbelow(MAX_CHANNEL), None) if c not in taken)
        peer.attach(endpoint, channel)
        endpoint.set_close_callback(self._closures.append, cb_args=((peer.name, peer.attachment),))

    def _greeted(self, peer: UcxPeer, kind: int, version: int, channel: int) -> None:
        """HELLO: the dialling side is there; answer, and prepare the receive that warms the connection up.
        WELCOME: the connection is open; send what was queued, then warm up (the first large block takes 45–90 ms)."""
        if version != WIRE_VERSION:
            self._lose(peer, Incompatible(f"{peer.name} speaks wire version {version}, this node {WIRE_VERSION}"))
            return
        try:
            peer.welcome(WIRE_VERSION, channel)
        except NodeLost as error:
            self._fail(peer, error)
            return
        if kind == HELLO:
            self.traffic.post(peer, Post(False, link_tag(peer.attachment, WARM), self._warm, _warmed))
        else:
            self.traffic.send_queued(peer)
            self.traffic.post(peer, Post(True, link_tag(channel, WARM), self._warm, _warmed))

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
            if peer.open and not peer.lost and silence <= limit:
                self._ping(peer)
            elif silence > limit and (peer.open or not peer.dialled):
                self._lose(peer, NodeLost(f"{peer.name}: silent for {silence:.1f} s"))

    def _ping(self, peer: UcxPeer) -> None:
        try:
            peer.check_active()
        except WireError as error:
            self._lose(peer, error)
        else:
            self.traffic.send(peer, ALIVE)

    def _closed(self, name: Peer, attachment: int) -> None:
        """UCX closed an endpoint. What arrived before is still read: a peer may say goodbye and leave."""
        peer = self.find(name)
        if peer is not None and peer.attachment == attachment:
            self.traffic.drain(peer)
            self._fail(peer, NodeLost(f"{name}: connection closed by the peer"))

    def _fail(self, peer: UcxPeer, error: Exception) -> None:
        """Dial again where the connection was never open, else lose the peer."""
        if peer.lost:
            return
        if not peer.open and peer.dialled and peer.tries < CONNECT_TRIES:
            peer.close()
            peer.attachment = 0
            self._loop.call_later(RETRY_S, lambda: self._dial(peer))
        elif not peer.open and peer.dialled:
            self._lose(peer, NodeLost(f"cannot reach {peer.dialled}: {error}"))
        else:
            self._lose(peer, error if isinstance(error, KvferryError) else NodeLost(f"{peer.name}: {error}"))

    def _lose(self, peer: UcxPeer, error: KvferryError) -> None:
        if peer.lost:
            return
        peer.lost = True
        if isinstance(error, WireError):
            log.warning("%s is dropped: %s", peer.name, error)
        for done in peer.abandon():
            guarded(done, error)
        if peer.open or peer.dialled:
            guarded(self._handler.peer_lost, peer.name, error)
        else:
            self.disconnect(peer.name)


def _warmed(error: Exception | None) -> None:
    """The warm-up transfer ended; an error shows up again as the loss of the peer."""
