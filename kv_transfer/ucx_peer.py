"""One endpoint of a UCX link: its greeting, framed control messages in order, and the blocks in flight (ucx_blocks).

Everything travels as tagged messages, because ucxx never gives up an active-message receive that stays unanswered, nor
the endpoint and worker it belongs to. Only HELLO, which is always answered, is an active message: it tells the
accepting side by which connection it came and on which channel (see tags) to answer. Control is cut into frames (see
ucx_frames); RING receives stand ready for them. A request of UCX keeps no reference to its buffer, so the peer does.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from kv_transfer.link import Done
from kv_transfer.tags import link_tag
from kv_transfer.ucx_blocks import Post, UcxBlocks
from kv_transfer.ucx_frames import FRAME_BYTES, GREETING, HEADER, HELLO, WELCOME, FrameReader, FrameWriter, greeting
from kv_transfer.ucx_library import UcxLibrary
from protocol.errors import NodeLost
from protocol.wire import WireError

CONTROL, WARM = range(2)
RING = 8


class UcxPeer:
    """State of one connection; only the link thread touches it. `name` is what the link's users hold; `dialled` is the
    address of a peer that this side connects to, empty where the peer connected. `lost` for good: by a loss, or closed
    by this side."""

    def __init__(self, name: str, library: UcxLibrary, now: float, dialled: str = ""):
        self.name, self.dialled = name, dialled
        self.open = self.lost = False
        self.heard_at = now
        self.tries = 0
        self.attachment = 0
        self.outbox: deque[bytes | Post] = deque()
        self._library = library
        self._endpoint: Any = None
        self._hello: Any = None
        self._frames_in: deque[tuple[Any, Any]] = deque()
        self._frames_out: deque[tuple[Any, bytes]] = deque()
        self.blocks = UcxBlocks(name, library)

    def attach(self, endpoint: Any, attachment: int) -> None:
        """Use this endpoint; `attachment` numbers it in this process and is its channel for the other side's frames."""
        assert self._endpoint is None, self.name
        self._endpoint, self.attachment = endpoint, attachment
        self.blocks.endpoint = endpoint
        self._channel = 0
        self._reader, self._writer = FrameReader(), FrameWriter()
        self._hello = None if self.dialled else endpoint.am_recv()
        for _ in range(RING):
            self._post_frame(np.zeros(HEADER.size + FRAME_BYTES, dtype=np.uint8))

    def _post_frame(self, buffer: Any) -> None:
        tag = self._library.api.UCXXTag(link_tag(self.attachment, CONTROL))
        self._frames_in.append((self._endpoint.tag_recv(self._library.array(buffer), tag), buffer))

    def greet(self, version: int) -> None:
        """Dialling side: tell the other one how to answer. Raises NodeLost."""
        data = GREETING.pack(version, self.attachment)
        self._frames_out.append((self._sent(self._endpoint.am_send, self._library.array(data)), data))

    def greeted(self, kind: int, data: bytes) -> tuple[int, int]:
        """(wire version, channel) of the other side's greeting. Raises WireError where none was due."""
        if self.open or (kind == WELCOME) is not bool(self.dialled):
            raise WireError("a greeting out of turn")
        return greeting(data)

    def check_active(self) -> None:
        """Raise WireError if active messages came that nobody asked for; they stay in memory until the end."""
        if self._endpoint is not None and self._endpoint.am_probe():
            raise WireError("more active messages than the greeting")

    def welcome(self, version: int, channel: int) -> None:
        """Accepting side, or the dialling one at the answer: frames go to this channel from now on."""
        self._channel, self.open = channel, True
        if not self.dialled:
            self.send_frames(WELCOME, GREETING.pack(version, self.attachment))

    def send_frames(self, kind: int, data: bytes = b"") -> None:
        """Queue one message, cut into frames. Raises NodeLost."""
        for frame in self._writer.cut(kind, data):
            tag = self._library.api.UCXXTag(link_tag(self._channel, CONTROL))
            self._frames_out.append((self._sent(self._endpoint.tag_send, self._library.array(frame), tag), frame))

    def _sent(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except self._library.api.UCXError as error:
            raise NodeLost(f"{self.name}: control message not sent: {error}") from error

    def receive_messages(self) -> list[tuple[int, bytes]]:
        """(kind, payload) of the messages that are whole now, in the order of their sending. Raises NodeLost, and
        WireError for what no link sends."""
        while self._frames_out and self._frames_out[0][0].completed:
            self._frames_out.popleft()
        messages: list[tuple[int, bytes]] = []
        try:
            if self._hello is not None and self._hello.completed:
                self._hello.check_error()
                messages.append((HELLO, np.asarray(self._hello.recv_buffer).tobytes()))
                self._hello = None
            while self._frames_in and self._frames_in[0][0].completed:
                request, buffer = self._frames_in.popleft()
                request.check_error()
                messages += self._reader.take(buffer.tobytes())
                self._post_frame(buffer)
        except self._library.api.UCXError as error:
            if not messages:
                raise NodeLost(f"{self.name}: connection broken: {error}") from error
        return messages

    def abandon(self) -> list[Done]:
        """Callbacks of every block not ended, also of those that waited for the connection."""
        dones = [post.done for post in self.outbox if isinstance(post, Post)]
        self.outbox.clear()
        return dones + self.blocks.abandon()

    def close(self) -> None:
        """Force the endpoint closed (some milliseconds); afterwards UCX touches none of its buffers."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()
            self._endpoint.remove_close_callback()
        self._endpoint = self._hello = None
        self._frames_out.clear()
        self._frames_in.clear()
        self.blocks.release()
