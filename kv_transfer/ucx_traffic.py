"""Traffic of a UCX link: sends and receives KV blocks (over UCX) and control messages (over sockets)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from kvferry.kv_transfer.control_stream import HANDSHAKE_KINDS, MESSAGE, Stream
from kvferry.kv_transfer.link import LinkHandler
from kvferry.kv_transfer.ucx_blocks import Post
from kvferry.kv_transfer.ucx_loop import READABLE, WRITABLE, UcxLoop
from kvferry.kv_transfer.ucx_peer import UcxPeer
from kvferry.protocol.errors import KvferryError, NodeLost

log = logging.getLogger(__name__)
DRAIN_ROUNDS = 64
"""Maximum number of rounds of a worker that drain a closed connection."""


class UcxTraffic:
    """Blocks and frames of a link's connections. Runs on the link thread.

    on_handshake(peer, kind, payload)  called for each frame of the handshake
    failed(peer, error)           called when a connection breaks or its peer sends invalid data
    """

    def __init__(
        self,
        loop: UcxLoop,
        on_handshake: Callable[[UcxPeer, int, bytes], None],
        failed: Callable[[UcxPeer, Exception], None],
    ):
        self._loop, self._on_handshake, self._failed = loop, on_handshake, failed
        self.handler: LinkHandler

    def post(self, peer: UcxPeer, post: Post) -> None:
        """Post a block now, or once the connection is open. `post.done` is called in every case."""
        if peer.lost:
            error: KvferryError = NodeLost(f"{peer.name}: not connected")
        elif not peer.open or peer.worker is None:
            peer.outbox.append(post)
            return
        else:
            try:
                peer.blocks.post(post)
                self._loop.activate(peer.worker)
                return
            except KvferryError as refused:
                error = refused
        self._loop.submit(lambda: post.done(error))

    def send(self, peer: UcxPeer, kind: int, data: bytes = b"") -> None:
        """Send a frame on a connection that is open or opening."""
        stream = peer.stream
        if stream is None:
            return
        try:
            stream.send(kind, data)
        except NodeLost as error:
            lost = NodeLost(f"{peer.name}: {error}")
            self._loop.submit(lambda: self._failed(peer, lost))
        else:
            if stream.unsent:
                self._watch(peer, stream)

    def send_queued(self, peer: UcxPeer) -> None:
        """Send everything that waited for the connection to open, in order."""
        while peer.outbox and not peer.lost:
            item = peer.outbox.popleft()
            if isinstance(item, Post):
                self.post(peer, item)
            else:
                self.send(peer, MESSAGE, item)

    def poll(self, peer: UcxPeer, progressed: bool) -> bool:
        """Call the callbacks of completed blocks; return whether any block had to be checked."""
        if progressed:
            peer.blocks.wake()
        if peer.lost or peer.blocks.scanned:
            return False
        for done, error in peer.blocks.reap():
            if error is None:
                peer.received_at = time.monotonic()
            guarded(done, error)
        return True

    def connect(self, peer: UcxPeer, stream: Stream) -> None:
        """Start watching the peer's socket. A connecting socket becomes writable once it is connected."""
        peer.stream = stream
        self._watch(peer, stream, connecting=bool(peer.dialled))

    def drain(self, peer: UcxPeer) -> None:
        """Receive what still arrived on a closed connection: a peer may send its last message and exit."""
        self._drain_blocks(peer)
        stream = peer.stream
        if stream is not None:
            with contextlib.suppress(KvferryError):
                self._read(peer, stream)

    def _drain_blocks(self, peer: UcxPeer) -> None:
        worker = peer.worker
        for _ in range(DRAIN_ROUNDS):
            if worker is None or peer.worker is not worker or not worker.round():
                break

    def _watch(self, peer: UcxPeer, stream: Stream, connecting: bool = False) -> None:
        events = READABLE | (WRITABLE if connecting or stream.unsent else 0)
        on_events = lambda events: self._on_events(peer, stream, events)  # noqa: E731
        self._loop.watch(stream.descriptor, events, on_events)

    def _on_events(self, peer: UcxPeer, stream: Stream, events: int) -> bool:
        """Handle events of a socket. An exception ends only this connection."""
        if peer.stream is not stream:
            return False
        if events & WRITABLE:
            self._guarded(peer, lambda: self._write(peer, stream))
        if peer.stream is stream and events & ~WRITABLE:
            self._guarded(peer, lambda: self._read(peer, stream))
        return True

    def _guarded(self, peer: UcxPeer, call: Callable[[], None]) -> None:
        try:
            call()
        except (KvferryError, OSError) as error:
            self._failed(peer, error)
        except Exception as error:
            log.exception("%s failed", peer.name)
            self._failed(peer, error)

    def _write(self, peer: UcxPeer, stream: Stream) -> None:
        stream.connected()
        stream.flush()
        if not stream.unsent:
            self._watch(peer, stream)

    def _read(self, peer: UcxPeer, stream: Stream) -> None:
        more = stream.fill()
        if not more and not peer.open and not peer.dialled:
            raise NodeLost("disconnected before its handshake was read")
        while not peer.lost and peer.stream is stream and (frame := stream.next()) is not None:
            peer.received_at = time.monotonic()
            kind, data = frame
            if kind in HANDSHAKE_KINDS:
                self._on_handshake(peer, kind, data)
            elif kind == MESSAGE:
                guarded(self.handler.message, peer.name, data)
        if not more and not peer.lost and peer.stream is stream:
            self._drain_blocks(peer)
            raise NodeLost("connection closed by the peer")


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Call a callback of the link's user and log its errors, which must not end the thread."""
    try:
        call(*args)
    except Exception:
        log.exception("a callback of the link failed")
