"""One endpoint of a UCX link: framed control messages in order, and the blocks in flight on it.

Control travels as active messages of at most FRAME_BYTES, below the size from which UCX would ask for a rendezvous:
header (kind, last, sequence number), then a piece of the message. Blocks travel as tagged messages. A request of UCX
keeps no reference to its buffer, so the peer does.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, NamedTuple

from kv_transfer.link import Done
from kv_transfer.ucx_library import UcxLibrary
from protocol.errors import NodeLost, TransferFailed

HELLO, WELCOME, MESSAGE, ALIVE = range(4)
FRAME_BYTES = 8000
HEADER = struct.Struct("<BBI")
SCAN = 64


class Operation(NamedTuple):
    request: Any
    buffer: Any
    done: Done


class Post(NamedTuple):
    """A block operation asked for before the connection was open."""

    send: bool
    tag: int
    buffer: Any
    done: Done


class UcxPeer:
    """State of one connection; only the link thread touches it. `name` is what the link's users hold; `dialled` is the
    address of a peer that this side connects to, empty where the peer connected."""

    def __init__(self, name: str, library: UcxLibrary, now: float, dialled: str = ""):
        self.name, self.dialled = name, dialled
        self.open = self.lost = False
        self.heard_at = now
        self.tries = 0
        self.attachment = 0
        self.outbox: deque[bytes | Post] = deque()
        self._library = library
        self._endpoint: Any = None
        self._frames_out: deque[tuple[Any, bytes]] = deque()
        self._operations: deque[Operation] = deque()
        self._kept: list[Operation] = []
        self._unscanned = 0

    def attach(self, endpoint: Any, attachment: int) -> None:
        """Use this endpoint; `attachment` numbers it, so that news of an earlier one can be told apart."""
        assert self._endpoint is None, self.name
        self._endpoint, self.attachment = endpoint, attachment
        self._inbound: Any = None
        self._expected = self._next_sequence = 0
        self._early: dict[int, tuple[int, int, bytes]] = {}
        self._pieces: list[bytes] = []

    @property
    def scanned(self) -> bool:
        """Whether every operation was looked at since UCX last made progress."""
        return not self._unscanned

    def wake(self) -> None:
        """UCX made progress: any operation may be complete now."""
        self._unscanned = len(self._operations)

    def send_frames(self, kind: int, data: bytes = b"") -> None:
        """Queue one message, cut into frames. Raises NodeLost."""
        for start in range(0, max(1, len(data)), FRAME_BYTES):
            last = start + FRAME_BYTES >= len(data)
            frame = HEADER.pack(kind, last, self._next_sequence) + data[start : start + FRAME_BYTES]
            self._next_sequence = (self._next_sequence + 1) & 0xFFFFFFFF
            try:
                request = self._endpoint.am_send(self._library.array(frame))
            except self._library.api.UCXError as error:
                raise NodeLost(f"{self.name}: control message not sent: {error}") from error
            self._frames_out.append((request, frame))

    def receive_messages(self) -> list[tuple[int, bytes]]:
        """(kind, payload) of the messages that are whole now, in the order of their sending. Raises NodeLost.

        One receive is always outstanding: ucxx's probe answers true for messages that are already taken.
        """
        messages: list[tuple[int, bytes]] = []
        try:
            if self._inbound is None:
                self._inbound = self._endpoint.am_recv()
            while self._inbound.completed:
                self._inbound.check_error()
                self._arrived(bytes(self._inbound.recv_buffer), messages)
                self._inbound = self._endpoint.am_recv()
        except self._library.api.UCXError as error:
            if not messages:
                raise NodeLost(f"{self.name}: connection broken: {error}") from error
        return messages

    def _arrived(self, data: bytes, messages: list[tuple[int, bytes]]) -> None:
        kind, last, sequence = HEADER.unpack_from(data)
        self._early[sequence] = kind, last, data[HEADER.size :]
        while (frame := self._early.pop(self._expected, None)) is not None:
            self._expected = (self._expected + 1) & 0xFFFFFFFF
            self._pieces.append(frame[2])
            if frame[1]:
                messages.append((frame[0], b"".join(self._pieces)))
                self._pieces.clear()

    def post(self, send: bool, tag: int, buffer: Any, done: Done) -> None:
        """Post a block. Raises ValueError for a buffer that UCX would silently treat wrongly, TransferFailed."""
        array = self._library.array(buffer)
        if not array.c_contiguous or not (send or not array.readonly):
            raise ValueError(f"a block's buffer must be contiguous{'' if send else ' and writable'}")
        call = self._endpoint.tag_send if send else self._endpoint.tag_recv
        try:
            request = call(array, self._library.api.UCXXTag(tag))
        except self._library.api.UCXError as error:
            raise TransferFailed(f"{self.name}: UCX refused a block: {error}") from error
        self._operations.append(Operation(request, (buffer, array), done))
        self._unscanned += 1

    def reap(self) -> list[tuple[Done, Exception | None]]:
        """Look at up to SCAN operations not looked at yet; those that ended, with their errors."""
        while self._frames_out and self._frames_out[0][0].completed:
            self._frames_out.popleft()
        ended: list[tuple[Done, Exception | None]] = []
        count = min(SCAN, self._unscanned)
        self._unscanned -= count
        for _ in range(count):
            operation = self._operations.popleft()
            if operation.request.completed:
                ended.append((operation.done, self._error_of(operation.request)))
            else:
                self._operations.append(operation)
        return ended

    def _error_of(self, request: Any) -> Exception | None:
        try:
            request.check_error()
        except self._library.api.UCXError as error:
            return TransferFailed(f"{self.name}: block not transferred: {error}")
        return None

    def abandon(self) -> list[Done]:
        """Callbacks of every operation not ended. Buffers stay referenced until `close`: UCX may still touch them."""
        dones = [post.done for post in self.outbox if isinstance(post, Post)]
        dones += [operation.done for operation in self._operations]
        self._kept.extend(self._operations)
        self.outbox.clear()
        self._operations.clear()
        self._unscanned = 0
        return dones

    def close(self) -> None:
        """Force the endpoint closed (some milliseconds); afterwards UCX touches none of its buffers."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()
            self._endpoint.remove_close_callback()
        self._endpoint = self._inbound = None
        self._frames_out.clear()
        self._kept.clear()
