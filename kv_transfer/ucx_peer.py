"""One peer connection of a UCX link: a control socket and its own UCX worker for blocks."""

from __future__ import annotations

from collections import deque

from kvferry.kv_transfer.handshake import Handshake, HandshakeTerms
from kvferry.kv_transfer.link import Done
from kvferry.kv_transfer.stream import Stream
from kvferry.kv_transfer.ucx_blocks import Post, UcxBlocks
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.kv_transfer.ucx_loop import UcxLoop
from kvferry.kv_transfer.ucx_worker import UcxWorker


class UcxPeer:
    """State of one connection; only the link thread touches it.

    `name` is what the link's users hold; `dialled` is the address of a peer that this side connects to, empty where the
    peer connected. `lost` for good: by a loss, or closed by this side. `greeting` tells one try to connect from the
    next."""

    def __init__(
        self, name: str, library: UcxLibrary, loop: UcxLoop, terms: HandshakeTerms, now: float, dialled: str = ""
    ):
        self.name, self.dialled = name, dialled
        self.open = self.lost = False
        self.heard_at = now
        self.tries = 0
        self.outbox: deque[bytes | Post] = deque()
        self.stream: Stream | None = None
        self.worker: UcxWorker | None = None
        self.blocks = UcxBlocks(name, library)
        self._loop, self._terms = loop, terms
        self.begin()

    def begin(self) -> None:
        """Another try, which has nothing in common with those before."""
        self.greeting = Handshake(self._terms, bool(self.dialled))

    def abandon(self) -> list[Done]:
        """Callbacks of every block not ended, also of those that waited for the connection."""
        dones = [post.done for post in self.outbox if isinstance(post, Post)]
        self.outbox.clear()
        return dones + self.blocks.abandon()

    def hang_up(self) -> None:
        """Close the socket, from which the other side learns of the end."""
        if self.stream is not None:
            self._loop.unwatch(self.stream.descriptor)
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        """Close all of it (some milliseconds); afterwards UCX touches none of its buffers."""
        self.hang_up()
        if self.worker is not None:
            self._loop.close_worker(self.worker, self.blocks.ended)
            self.worker = None
        self.blocks.release()
