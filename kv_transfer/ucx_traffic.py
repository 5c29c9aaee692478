"""What moves on the connections of a UCX link once they are attached: blocks, and control messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kv_transfer.link import LinkHandler
from kv_transfer.ucx_blocks import Post
from kv_transfer.ucx_frames import HELLO, MESSAGE, WELCOME
from kv_transfer.ucx_peer import UcxPeer
from protocol.errors import KvferryError, NodeLost
from protocol.wire import WireError

log = logging.getLogger(__name__)
Greeted = Callable[[UcxPeer, int, int, int], None]


class UcxTraffic:
    """Runs on the link thread. greeted(peer, kind, wire version, channel): its HELLO or WELCOME came. failed(peer,
    error): its connection broke, or it sent what no link sends."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        greeted: Greeted,
        failed: Callable[[UcxPeer, Exception], None],
    ):
        self._submit, self._greeted, self._failed = submit, greeted, failed
        self.handler: LinkHandler

    def post(self, peer: UcxPeer, post: Post) -> None:
        """Post a block now, or once the connection is open; it ends in `post.done` whatever happens."""
        if peer.lost:
            error: KvferryError = NodeLost(f"{peer.name}: not connected")
        elif not peer.open:
            peer.outbox.append(post)
            return
        else:
            try:
                peer.blocks.post(post)
                return
            except KvferryError as refused:
                error = refused
        self._submit(lambda: post.done(error))

    def send(self, peer: UcxPeer, kind: int, data: bytes = b"") -> None:
        """Send a control message on an open connection."""
        try:
            peer.send_frames(kind, data)
        except NodeLost as error:
            lost = error
            self._submit(lambda: self._failed(peer, lost))

    def send_queued(self, peer: UcxPeer) -> None:
        """The connection is open: send what waited for it, in order."""
        while peer.outbox and not peer.lost:
            item = peer.outbox.popleft()
            if isinstance(item, Post):
                self.post(peer, item)
            else:
                self.send(peer, MESSAGE, item)

    def poll(self, peer: UcxPeer, progressed: bool) -> bool:
        """Report what ended and, after progress, what arrived; whether there was anything to do."""
        if peer.lost or not peer.attachment:
            return False
        worked = not peer.blocks.scanned
        for done, error in peer.blocks.reap():
            if error is None:
                peer.heard_at = time.monotonic()
            guarded(done, error)
        if progressed and not peer.lost:
            worked |= self._read(peer)
        return worked

    def drain(self, peer: UcxPeer) -> None:
        """Everything that arrived on a connection that UCX has closed."""
        peer.blocks.wake()
        while self.poll(peer, True) and not peer.blocks.scanned:
            pass

    def _read(self, peer: UcxPeer) -> bool:
        try:
            messages = peer.receive_messages()
            for kind, data in messages:
                peer.heard_at = time.monotonic()
                if peer.lost:
                    break
                self._take(peer, kind, data)
        except (NodeLost, WireError) as error:
            self._failed(peer, error)
            return True
        return bool(messages)

    def _take(self, peer: UcxPeer, kind: int, data: bytes) -> None:
        """One message. Raises WireError for what its sender may not send now."""
        if kind in (HELLO, WELCOME):
            self._greeted(peer, kind, *peer.greeted(kind, data))
        elif not peer.open:
            raise WireError("a message before the greeting")
        elif kind == MESSAGE:
            guarded(self.handler.message, peer.name, data)


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Call what a user of the link gave: its errors are its own and end no thread."""
    try:
        call(*args)
    except Exception:
        log.exception("a callback of the link failed")
