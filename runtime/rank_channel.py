"""Channels between rank 0 and the other ranks, on this host or others: broadcasts, messages, answers and barriers.

A channel breaks at once when the process at either end exits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Protocol


class Line(Protocol):
    """Two-way stream of messages: a pipe within a host, a socket between hosts."""

    def send_bytes(self, message: bytes | memoryview, /) -> None:
        """Send a message. Raises OSError."""

    def recv_bytes(self) -> bytes | bytearray:
        """Return the next message. Raises OSError, or EOFError if the other end is closed."""

    def close(self) -> None:
        """Close this end."""


class RankZeroChannels:
    """Channels of rank 0 to all other ranks.

    Not thread-safe. The methods raise OSError or EOFError if another rank has ended.

    others: number of other ranks on this host. remote: lines to ranks on other hosts, numbered after them."""

    def __init__(self, others: int, remote: Sequence[Line] = ()) -> None:
        pairs = [Pipe() for _ in range(others)]
        self._ours: Sequence[Line] = [*(ours for ours, _ in pairs), *remote]
        self._theirs = [theirs for _, theirs in pairs]

    def descriptor(self, other: int) -> int:
        """Return the descriptor of another rank's end for its process to inherit; then call `close_inherited`."""
        return self._theirs[other].fileno()

    def close_inherited(self) -> None:
        """Close the other ranks' ends here, after their processes have inherited them."""
        for theirs in self._theirs:
            theirs.close()

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks."""
        for line in self._ours:
            line.send_bytes(message)

    def send(self, other: int, message: bytes | memoryview) -> None:
        """Send a message to one other rank."""
        self._ours[other].send_bytes(message)

    def receive(self, other: int) -> bytes | bytearray:
        """Receive the next message of another rank."""
        return self._ours[other].recv_bytes()

    def barrier(self) -> None:
        """Wait until all other ranks have called `RankChannel.barrier`.

        Writes to shared memory before this barrier are visible to all ranks after it."""
        for line in self._ours:
            line.recv_bytes()
        for line in self._ours:
            line.send_bytes(b"")

    def close(self) -> None:
        """Close this end of all channels."""
        for line in self._ours:
            line.close()


class RankChannel:
    """Channel of another rank to rank 0, over an inherited descriptor or another line.

    The methods raise OSError or EOFError if rank 0 has ended."""

    def __init__(self, line: int | Line) -> None:
        if isinstance(line, int):
            os.set_inheritable(line, False)
            line = Connection(line)
        self._line: Line = line

    def receive(self) -> bytes | bytearray:
        """Receive the next message of rank 0."""
        return self._line.recv_bytes()

    def send(self, message: bytes | memoryview) -> None:
        """Send a message to rank 0."""
        self._line.send_bytes(message)

    def barrier(self) -> None:
        """Wait for all ranks, like `RankZeroChannels.barrier`."""
        self._line.send_bytes(b"")
        self._line.recv_bytes()
