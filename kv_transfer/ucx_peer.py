"""One peer connection of a UCX link: a socket for control messages, and a UCX worker of its own for blocks."""

from __future__ import annotations

from collections import deque

from kvferry.kv_transfer.control_stream import Stream
from kvferry.kv_transfer.handshake import Handshake, HandshakeTerms
from kvferry.kv_transfer.link import Done
from kvferry.kv_transfer.ucx_blocks import Post, UcxBlocks
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.kv_transfer.ucx_loop import UcxLoop
from kvferry.kv_transfer.ucx_worker import UcxWorker


class UcxPeer:
    """State of one connection. Only the link thread touches it.

    name       identifies the connection to the link's users
    dialled    address that this side connects to; empty if the peer connected
    lost       whether the connection was lost, or closed by this side
    handshake  handshake of the current attempt to connect
    outbox     messages and blocks that wait for the connection to open
    """

    def __init__(
        self, name: str, library: UcxLibrary, loop: UcxLoop, terms: HandshakeTerms, now: float, dialled: str = ""
    ):
        self.name, self.dialled = name, dialled
        self.open = self.lost = False
        self.received_at = now
        self.tries = 0
        self.outbox: deque[bytes | Post] = deque()
        self.stream: Stream | None = None
        self.worker: UcxWorker | None = None
        self.blocks = UcxBlocks(name, library)
        self._loop, self._terms = loop, terms
        self.begin()

    def begin(self) -> None:
        """Start another attempt with a new handshake."""
        self.handshake = Handshake(self._terms, bool(self.dialled))

    def abandon(self) -> list[Done]:
        """Return the callbacks of all blocks in flight and of those that wait for the connection."""
        dones = [post.done for post in self.outbox if isinstance(post, Post)]
        self.outbox.clear()
        return dones + self.blocks.abandon()

    def close_socket(self) -> None:
        """Close the socket; the other side notices it."""
        if self.stream is not None:
            self._loop.unwatch(self.stream.descriptor)
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        """Close socket and worker, which takes some milliseconds; afterwards UCX touches none of the buffers."""
        self.close_socket()
        if self.worker is not None:
            self._loop.close_worker(self.worker, self.blocks.ended)
            self.worker = None
        self.blocks.release()
