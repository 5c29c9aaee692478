"""Link interface: moves control messages and KV blocks between processes.

Implementations: `ucx` (the real one), `loopback` (two ends in one process, deterministic), `fault_injection` (wraps a
link and loses, delays or breaks on demand). One thread owns a link; everything except `submit`, `start` and `stop` is
called on that thread, and so is every callback.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

MAX_MESSAGE_BYTES = 4 << 20
Peer = Hashable
Done = Callable[[Exception | None], None]


class LinkHandler(Protocol):
    """Handler of a link's events: the dock of a node."""

    def message(self, peer: Peer, data: bytes) -> None:
        """A control message arrived whole, in the order in which the peer sent it."""

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        """The peer died, closed, could not be reached, or stopped answering pings.

        Called once per peer; all its operations have been or will be completed with an error. Memory is quiet only
        after `disconnect`'s callback."""


class Link(Protocol):
    """Moves bytes.

    Buffers are C-contiguous and writable where received into (numpy uint8 on a CPU, objects with the CUDA array
    interface on a GPU); the link keeps a reference to each until its operation is done."""

    @property
    def address(self) -> str:
        """host:port that peers connect to; known once `start` returned."""

    def start(self, handler: LinkHandler) -> None:
        """Open the listener and start the thread. Raises ConfigError naming the remedy."""

    def stop(self) -> None:
        """Close every endpoint, complete every operation, join the thread."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the link thread soon. The only method for other threads."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call` on the link thread after `delay_s` seconds."""

    def connect(self, address: str) -> Peer:
        """Begin a connection; messages and blocks may be queued at once. Failure is reported by `peer_lost`."""

    def send(self, peer: Peer, data: bytes) -> None:
        """Queue a control message (small: at most MAX_MESSAGE_BYTES)."""

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        """Send a buffer to the receive with this tag. `done(None)`: the buffer may be reused (not: it arrived)."""

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        """Post a receive for this buffer's bytes.

        `done(None)`: they arrived. A shorter send completes it too, having written only its own bytes: that is how the
        sender of an aborted ship completes receives it will not fill."""

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        """Force the endpoint closed.

        When `quiet` runs, every `done` of this peer was called and no buffer of its operations is touched any more."""
