"""Channel between rank 0 and the other ranks: ordered broadcast messages and barriers.

It breaks at once when a process ends at either end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe


class RankChannels:
    """Channels of rank 0 to all other ranks.

    Not thread-safe. What it calls raises OSError or EOFError where another one is gone."""

    def __init__(self, others: int) -> None:
        pairs = [Pipe() for _ in range(others)]
        self._ours: Sequence[Connection] = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]

    def give(self, other: int) -> int:
        """A descriptor of the other's end, to be inherited; `given` must follow."""
        return self._theirs[other].fileno()

    def given(self) -> None:
        """The others have their ends: here they are closed."""
        for theirs in self._theirs:
            theirs.close()

    def tell(self, message: bytes) -> None:
        """Send to all other ranks."""
        for line in self._ours:
            line.send_bytes(message)

    def hear(self, other: int) -> bytes:
        """Receive what a rank sends by `RankChannel.say`."""
        return self._ours[other].recv_bytes()

    def meet(self) -> None:
        """Returns once all others have called `RankChannel.meet`; what was written to shared memory before is seen
        after."""
        for line in self._ours:
            line.recv_bytes()
        for line in self._ours:
            line.send_bytes(b"")

    def close(self) -> None:
        for line in self._ours:
            line.close()


class RankChannel:
    """Channel of another rank to rank 0, over an inherited descriptor.

    Raises OSError or EOFError where the first one is gone."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._line = Connection(descriptor)

    def hear(self) -> bytes:
        """The next message."""
        return self._line.recv_bytes()

    def say(self, message: bytes) -> None:
        self._line.send_bytes(message)

    def meet(self) -> None:
        """Wait for all ranks, as `RankChannels.meet` does."""
        self._line.send_bytes(b"")
        self._line.recv_bytes()
