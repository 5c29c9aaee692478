"""Interface of a link between nodes, which moves control messages and KV blocks; `ucx` implements it.

The tests have a deterministic implementation within one process and a faulty one. One thread owns a link. `submit`,
`start` and `stop` may be called from other threads; all other calls, and all callbacks, run on the link thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

MAX_MESSAGE_BYTES = 4 << 20
"""Maximum size of a control message in bytes."""
Peer = Hashable
Done = Callable[[Exception | None], None]


class LinkHandler(Protocol):
    """Receiver of a link's events. A node's dock implements it."""

    def message(self, peer: Peer, data: bytes) -> None:
        """Handle one complete control message; messages of a peer arrive in the order in which it sent them."""

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        """Handle a peer that died, closed, could not be reached, or stopped answering pings.

        Called once per peer. Every operation of the peer has completed or will complete with an error. Buffers may
        still be written to until the callback of `disconnect` runs."""


class Link(Protocol):
    """Transport of one node: connections, control messages and block transfers.

    Buffers are C-contiguous, and writable if received into: numpy uint8 on a CPU, objects with the CUDA array interface
    on a GPU. The link holds a reference to each buffer until its operation is done."""

    @property
    def address(self) -> str:
        """Return the host:port that peers connect to; known once `start` has returned."""

    def start(self, handler: LinkHandler) -> None:
        """Open the listener and start the thread. Raises ConfigError naming the remedy."""

    def stop(self) -> None:
        """Close every endpoint, complete every operation and join the thread."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the link thread soon. Thread-safe."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call` on the link thread after `delay_s` seconds."""

    def connect(self, address: str) -> Peer:
        """Begin a connection. Messages and blocks may be queued at once; `peer_lost` reports a failure."""

    def send(self, peer: Peer, data: bytes) -> None:
        """Queue a control message of at most MAX_MESSAGE_BYTES."""

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        """Send a buffer to the receive with this tag.

        `done(None)`: the buffer may be reused, although its bytes may still be in flight."""

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        """Post a receive into this buffer under a tag. `done(None)`: the bytes arrived.

        A shorter send also completes the receive and writes only its own bytes. The sender of an aborted ship uses this
        to complete the receives that it will not fill."""

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        """Force the connection closed.

        When `quiet` runs, every `done` of this peer has been called and nothing touches the buffers of its operations
        any more."""
