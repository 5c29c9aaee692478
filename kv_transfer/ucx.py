"""The link over UCX: connections, heartbeat and loss of peers on top of the thread of ucx_loop.

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
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_transfer.link import MAX_MESSAGE_BYTES, Done, LinkHandler, Peer
from kv_transfer.listening import addresses_of, restrict
from kv_transfer.tags import MAX_CHANNEL, link_tag
from kv_transfer.ucx_frames import ALIVE, HELLO, MESSAGE, WELCOME
from kv_transfer.ucx_library import context_options, load
from kv_transfer.ucx_loop import UcxLoop
from kv_transfer.ucx_peer import WARM, Post, UcxPeer
from protocol.errors import ConfigError, Incompatible, KvferryError, NodeLost
from protocol.layout import WIRE_VERSION
from protocol.wire import WireError

log = logging.getLogger(__name__)
WARM_BYTES = 1 << 19
CONNECT_TRIES = 3
RETRY_S = 0.2
AFTER_CLOSE_S = 0.002


class UcxLink:
    """Implements kv_transfer.link.Link.

    host            what peers dial, also decides the default devices
    listen          host whose addresses are listened on, by default what peers dial; 0.0.0.0 for all of the machine's
    port            0 lets the kernel choose
    transports      UCX_TLS; net_devices UCX_NET_DEVICES; empty: see ucx_library.context_options
    cuda            add the CUDA lanes; prepare then makes the device current on the link thread
    ping_interval   seconds between ALIVE frames
    silence_limit   seconds without any sign of a peer before it is lost
    connect_timeout seconds that each of three tries to connect may take
    on_fault        called once, on the link thread, when that thread ends by an exception: no operation will complete
                    any more, so the process must end; its argument is also `fault` from then on
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        listen: str | None = None,
        transports: str = "",
        net_devices: str = "",
        cuda: bool = False,
        prepare: Callable[[], None] | None = None,
        ping_interval: float = 0.5,
        silence_limit: float = 5.0,
        connect_timeout: float = 2.0,
        on_fault: Callable[[str], None] = lambda fault: None,
    ):
        self._host, self._port = host, port
        self._listen = host if listen is None else listen
        self._options = context_options(host, transports, net_devices, cuda)
        self._ping_interval, self._silence_limit = ping_interval, silence_limit
        self._connect_timeout = connect_timeout
        self._library = load()
        self._loop = UcxLoop(self._library, self._options, prepare, self._opened, self._poll, self._closing, on_fault)
        self._serial = itertools.count(1)
        self._peers: dict[Peer, UcxPeer] = {}
        self._arrivals: deque[int] = deque()
        self._closures: deque[tuple[Peer, int]] = deque()
        self._warm = np.zeros(WARM_BYTES, dtype=np.uint8)

    @property
    def address(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def fault(self) -> str | None:
        """Why the link thread ended by itself, if it did."""
        return self._loop.fault

    @property
    def heartbeat(self) -> float:
        """Monotonic seconds of the link thread's last round; an idle thread makes one at every ping."""
        return self._loop.heartbeat

    def start(self, handler: LinkHandler) -> None:
        self._handler = handler
        try:
            self._loop.start()
        except Exception as error:
            raise ConfigError(
                f"the UCX link cannot start on port {self._port} with {self._options}: {error}. Choose another "
                "--link-port, or check --ucx-transports and --ucx-net-devices with `kvferry doctor`"
            ) from error

    def stop(self) -> None:
        self._loop.stop()

    def submit(self, call: Callable[[], None]) -> None:
        self._loop.submit(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, call)

    def connect(self, address: str) -> Peer:
        peer = UcxPeer(f"{address}#{next(self._serial)}", self._library, time.monotonic(), dialled=address)
        self._peers[peer.name] = peer
        self._loop.submit(lambda: self._dial(peer))
        return peer.name

    def send(self, peer: Peer, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE_BYTES, f"control message of {len(data)} bytes"
        known = self._peers.get(peer)
        if known is None or known.lost:
            return
        if known.open:
            self._send_frames(known, MESSAGE, data)
        else:
            known.outbox.append(data)

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, Post(True, tag, buffer, done))

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, Post(False, tag, buffer, done))

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            error = NodeLost(f"{peer}: disconnected")
            for done in known.abandon():
                self._loop.submit(lambda done=done: done(error))  # type: ignore[misc]
            known.close()
            self._progress_for(AFTER_CLOSE_S)
        self._loop.submit(quiet)

    # The link thread: opening, rounds, closing.

    def _opened(self, worker: Any) -> None:
        self._worker = worker
        self._listener = self._library.api.UCXListener.create(worker, self._port, self._arrivals.append)
        self._port = self._listener.port
        self._restrict()
        self._ticked_at = time.monotonic()
        self._loop.call_later(self._ping_interval, self._tick)

    def _restrict(self) -> None:
        """Before any connection is accepted: only those who dial the host listened on get through."""
        addresses = addresses_of(self._listen)
        if addresses is None:
            return
        if not addresses:
            log.warning(
                "nobody can reach this link: UCX listens on IPv4 only, and %s has no such address", self._listen
            )
        try:
            restrict(self._port, addresses)
        except OSError as error:
            log.warning("the link listens on all addresses of this machine, not on %s only: %s", self._listen, error)

    def _poll(self, progressed: bool) -> bool:
        worked = False
        while self._arrivals:
            self._accept(self._arrivals.popleft())
            worked = True
        while self._closures:
            self._closed(*self._closures.popleft())
            worked = True
        for peer in tuple(self._peers.values()):
            if progressed:
                peer.wake()
            if (progressed or not peer.scanned) and self._poll_peer(peer, progressed):
                worked = True
        return worked

    def _poll_peer(self, peer: UcxPeer, progressed: bool) -> bool:
        if peer.lost or not peer.attachment:
            return False
        worked = not peer.scanned
        for done, error in peer.reap():
            if error is None:
                peer.heard_at = time.monotonic()
            self._guarded(done, error)
        if progressed and not peer.lost and peer.name in self._peers:
            worked |= self._read(peer)
        return worked

    def _read(self, peer: UcxPeer) -> bool:
        try:
            messages = peer.receive_messages()
            for kind, data in messages:
                peer.heard_at = time.monotonic()
                if self._peers.get(peer.name) is not peer or peer.lost:
                    break
                self._take(peer, kind, data)
        except (NodeLost, WireError) as error:
            self._fail(peer, error)
            return True
        return bool(messages)

    def _take(self, peer: UcxPeer, kind: int, data: bytes) -> None:
        """One message. Raises WireError for what its sender may not send now."""
        if kind in (HELLO, WELCOME):
            self._greeted(peer, kind, *peer.greeted(kind, data))
        elif not peer.open:
            raise WireError("a message before the greeting")
        elif kind == MESSAGE:
            self._guarded(self._handler.message, peer.name, data)

    def _closing(self) -> None:
        for peer in tuple(self._peers.values()):
            self._lose(peer, NodeLost(f"{peer.name}: link stopped"))
        for name in tuple(self._peers):
            self.disconnect(name, lambda: None)
        self._listener = self._worker = None

    def _progress_for(self, seconds: float) -> None:
        """Let UCX finish what closing an endpoint began; a worker whose endpoints are not done is never freed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._worker.progress()

    # Connections.

    def _dial(self, peer: UcxPeer) -> None:
        if self._peers.get(peer.name) is not peer:
            return
        peer.tries += 1
        try:
            host, _, port = peer.dialled.rpartition(":")
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            endpoint = self._worker.create_endpoint_from_hostname(str(found[0][4][0]), int(port), True)
            self._attach(peer, endpoint)
            peer.greet(WIRE_VERSION)
        except (OSError, ValueError, NodeLost, self._library.api.UCXError) as error:
            self._fail(peer, error)
            return
        attachment = peer.attachment
        self.call_later(self._connect_timeout, lambda: self._dial_timed_out(peer, attachment))

    def _dial_timed_out(self, peer: UcxPeer, attachment: int) -> None:
        if not peer.open and peer.attachment == attachment and self._peers.get(peer.name) is peer:
            self._fail(peer, NodeLost(f"no answer in {self._connect_timeout} s"))

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
            self._post(peer.name, Post(False, link_tag(peer.attachment, WARM), self._warm, _warmed))
            return
        while peer.outbox and not peer.lost:
            item = peer.outbox.popleft()
            if isinstance(item, Post):
                self._post(peer.name, item)
            else:
                self._send_frames(peer, MESSAGE, item)
        self._post(peer.name, Post(True, link_tag(channel, WARM), self._warm, _warmed))

    def _post(self, name: Peer, post: Post) -> None:
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            error: KvferryError = NodeLost(f"{name}: not connected")
        elif not peer.open:
            peer.outbox.append(post)
            return
        else:
            try:
                peer.post(*post)
                return
            except KvferryError as refused:
                error = refused
        self._loop.submit(lambda: post.done(error))

    def _send_frames(self, peer: UcxPeer, kind: int, data: bytes = b"") -> None:
        try:
            peer.send_frames(kind, data)
        except NodeLost as error:
            lost = error
            self._loop.submit(lambda: self._fail(peer, lost))

    # Loss.

    def _tick(self) -> None:
        """Send ALIVE and judge silence; time during which this process itself stood still counts for nobody."""
        self.call_later(self._ping_interval, self._tick)
        now = time.monotonic()
        stall = max(0.0, now - self._ticked_at - 2 * self._ping_interval)
        self._ticked_at = now
        for peer in tuple(self._peers.values()):
            peer.heard_at += stall
            silence = now - peer.heard_at
            if peer.open and not peer.lost and silence <= self._silence_limit:
                self._ping(peer)
            elif silence > self._silence_limit and (peer.open or not peer.dialled):
                self._lose(peer, NodeLost(f"{peer.name}: silent for {silence:.1f} s"))

    def _ping(self, peer: UcxPeer) -> None:
        try:
            peer.check_active()
        except WireError as error:
            self._lose(peer, error)
        else:
            self._send_frames(peer, ALIVE)

    def _closed(self, name: Peer, attachment: int) -> None:
        """UCX closed an endpoint. What arrived before is still read: a peer may say goodbye and leave."""
        peer = self._peers.get(name)
        if peer is None or peer.lost or peer.attachment != attachment:
            return
        peer.wake()
        while self._poll_peer(peer, True) and not peer.scanned:
            pass
        self._fail(peer, NodeLost(f"{name}: connection closed by the peer"))

    def _fail(self, peer: UcxPeer, error: Exception) -> None:
        """Dial again where the connection was never open, else lose the peer."""
        if peer.lost or self._peers.get(peer.name) is not peer:
            return
        if not peer.open and peer.dialled and peer.tries < CONNECT_TRIES:
            peer.close()
            peer.attachment = 0
            self.call_later(RETRY_S, lambda: self._dial(peer))
        elif not peer.open and peer.dialled:
            self._lose(peer, NodeLost(f"cannot reach {peer.dialled}: {error}"))
        else:
            self._lose(peer, error if isinstance(error, KvferryError) else NodeLost(f"{peer.name}: {error}"))

    def _lose(self, peer: UcxPeer, error: KvferryError) -> None:
        if peer.lost:
            return
        peer.lost = True
        if isinstance(error, WireError):
            log.warning("%s is dropped: it sent %s", peer.name, error)
        for done in peer.abandon():
            self._guarded(done, error)
        if peer.open or peer.dialled:
            self._guarded(self._handler.peer_lost, peer.name, error)
        else:
            self.disconnect(peer.name, lambda: None)

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            log.exception("a callback of the link failed")


def _warmed(error: Exception | None) -> None:
    """The warm-up transfer ended; an error shows up again as the loss of the peer."""
