"""Channel between rank 0 and the other ranks: ordered broadcast messages and barriers.

It breaks at once when the process at either end exits."""

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


class RankChannels:
    """Channels of rank 0 to all other ranks.

    Not thread-safe. Its methods raise OSError or EOFError if another rank is gone.

    others: ranks of this host beside rank 0. remote: lines to the ranks of other hosts, which come after those."""

    def __init__(self, others: int, remote: Sequence[Line] = ()) -> None:
        pairs = [Pipe() for _ in range(others)]
        self._ours: Sequence[Line] = [*(ours for ours, _ in pairs), *remote]
        self._theirs = [theirs for _, theirs in pairs]

    def give(self, other: int) -> int:
        """Return the descriptor of another rank's end for its process to inherit; call `given` afterwards."""
        return self._theirs[other].fileno()

    def given(self) -> None:
        """Close the other ranks' ends here, after their processes have inherited them."""
        for theirs in self._theirs:
            theirs.close()

    def tell(self, message: bytes) -> None:
        """Send a message to all other ranks."""
        for line in self._ours:
            line.send_bytes(message)

    def tell_one(self, other: int, message: bytes | memoryview) -> None:
        """Send a message to one other rank."""
        self._ours[other].send_bytes(message)

    def hear(self, other: int) -> bytes | bytearray:
        """Receive the next message that a rank sent by `RankChannel.say`."""
        return self._ours[other].recv_bytes()

    def meet(self) -> None:
        """Wait until all other ranks have called `RankChannel.meet`.

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

    Its methods raise OSError or EOFError if rank 0 is gone."""

    def __init__(self, line: int | Line) -> None:
        if isinstance(line, int):
            os.set_inheritable(line, False)
            line = Connection(line)
        self._line: Line = line

    def hear(self) -> bytes | bytearray:
        """Receive the next message of rank 0."""
        return self._line.recv_bytes()

    def say(self, message: bytes | memoryview) -> None:
        """Send a message to rank 0."""
        self._line.send_bytes(message)

    def meet(self) -> None:
        """Wait for all ranks, as `RankChannels.meet` does."""
        self._line.send_bytes(b"")
        self._line.recv_bytes()
