"""Control messages cut into frames and put together again. A frame: kind, last, sequence number, length, then a piece
of the message. Whatever comes from the wire is checked here before it is stored or believed; this module knows no UCX.

FRAME_BYTES lies below the size from which UCX asks for a rendezvous. Every piece but the last of a message is full, so
a message has a bounded number of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kv_transfer.link import MAX_MESSAGE_BYTES
from kv_transfer.tags import MAX_CHANNEL
from protocol.wire import WireError

HELLO, WELCOME, MESSAGE, ALIVE = range(4)
"""Kinds of messages. HELLO travels as an active message, never in frames."""
FRAME_BYTES = 8000
HEADER = struct.Struct("<BBII")
GREETING = struct.Struct("<BI")
"""Of HELLO and WELCOME: wire version, and the channel on which the sender of the greeting listens."""
MAX_AHEAD = 64
"""Frames that may arrive before an earlier one; UCX completes the receives that stand ready nearly in order."""
SEQUENCES = 1 << 32


def greeting(data: bytes) -> tuple[int, int]:
    """(wire version, channel) of a greeting. Raises WireError."""
    if len(data) != GREETING.size:
        raise WireError(f"a greeting has {GREETING.size} bytes, not {len(data)}")
    version, channel = GREETING.unpack(data)
    if not 0 < channel <= MAX_CHANNEL:
        raise WireError(f"no link listens on channel {channel}")
    return version, channel


class FrameWriter:
    """Frames of one direction of a connection, numbered in the order of their making."""

    def __init__(self) -> None:
        self._sequence = 0

    def cut(self, kind: int, data: bytes) -> Iterator[bytes]:
        """The frames of one message; all of them must be sent."""
        for start in range(0, max(1, len(data)), FRAME_BYTES):
            piece = data[start : start + FRAME_BYTES]
            yield HEADER.pack(kind, start + FRAME_BYTES >= len(data), self._sequence, len(piece)) + piece
            self._sequence = (self._sequence + 1) % SEQUENCES


class FrameReader:
    """Messages of one direction of a connection, in the order of their sending."""

    def __init__(self) -> None:
        self._expected = 0
        self._early: dict[int, tuple[int, int, bytes]] = {}
        self._pieces: list[bytes] = []

    def take(self, buffer: bytes) -> list[tuple[int, bytes]]:
        """(kind, payload) of the messages that became whole by the frame at the start of `buffer`. Raises WireError,
        after which the connection is of no use."""
        kind, last, sequence, length = HEADER.unpack_from(buffer)
        self._check(kind, last, sequence, length)
        self._early[sequence] = kind, last, buffer[HEADER.size : HEADER.size + length]
        messages: list[tuple[int, bytes]] = []
        while (frame := self._early.pop(self._expected, None)) is not None:
            self._expected = (self._expected + 1) % SEQUENCES
            self._pieces.append(frame[2])
            if frame[1]:
                messages.append((frame[0], b"".join(self._pieces)))
                self._pieces.clear()
            elif len(self._pieces) * FRAME_BYTES >= MAX_MESSAGE_BYTES:
                raise WireError(f"a control message of more than {MAX_MESSAGE_BYTES} bytes")
        return messages

    def _check(self, kind: int, last: int, sequence: int, length: int) -> None:
        if kind not in (WELCOME, MESSAGE, ALIVE) or last > 1:
            raise WireError(f"no frame has kind {kind} with end mark {last}")
        if length > FRAME_BYTES or (length < FRAME_BYTES and not last):
            raise WireError(f"a frame of {length} bytes")
        if (sequence - self._expected) % SEQUENCES >= MAX_AHEAD or sequence in self._early:
            raise WireError(f"frame {sequence} where {self._expected} was due")
