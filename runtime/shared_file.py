"""Shared memory that one process writes once and all processes of a machine read.

It is a file without a name, so it needs no place on any file system, is open to those alone who were given it, and is
gone with the last of them. Anyone who writes it seals it when it is whole: from then on the kernel lets nobody write
it, and what is not sealed is nothing. A writer that dies has left its turn, and the next one begins anew.
"""

from __future__ import annotations

import fcntl
import os
import time

_POLL_S = 0.05
STALLED_S = 600.0
"""How long a writer may add nothing, as while a slow disk brings the largest tensor, before others do without it."""


def make() -> int:
    """A descriptor of such memory, for all that are to open it; -1 where the system has none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1


class SharedFile:
    """One process's way to the memory that `make` made. Raises OSError: the descriptor is not open."""

    def __init__(self, descriptor: int) -> None:
        self._path, self._writes = f"/proc/self/fd/{descriptor}", False
        self.writing = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        """Of this process alone, and so are its locks, while the descriptor that it inherited is everybody's."""

    @property
    def whole(self) -> bool:
        """Return whether it was written and sealed."""
        return bool(fcntl.fcntl(self.writing, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    @property
    def size(self) -> int:
        return os.fstat(self.writing).st_size

    def take_turn(self, stalled_s: float = STALLED_S) -> bool:
        """Wait until it is whole, and return False; or until this process may write it, which is empty then: True.

        A turn ends with `seal`, `close`, or the process. Raises TimeoutError: who writes it has not come further for so
        long."""
        size, end = -1, 0.0
        while not self.whole:
            if self._locked():
                if self.whole:
                    break
                os.ftruncate(self.writing, 0)
                self._writes = True
                return True
            if self.size != size:
                size, end = self.size, time.monotonic() + stalled_s
            elif time.monotonic() > end:
                raise TimeoutError(f"nothing was written for {stalled_s:.0f} s")
            time.sleep(_POLL_S)
        fcntl.flock(self.writing, fcntl.LOCK_UN)
        return False

    def seal(self) -> None:
        """It is whole, and this process's turn is over. Raises OSError: it is mapped somewhere to be written."""
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self.writing, fcntl.F_ADD_SEALS, seals)
        self._writes = False
        fcntl.flock(self.writing, fcntl.LOCK_UN)

    def reader(self) -> int:
        """A descriptor that only reads, to be closed: some kernels map what is sealed through no other."""
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Also ends this process's turn; what it wrote without sealing it is gone."""
        if self._writes:
            os.ftruncate(self.writing, 0)
        os.close(self.writing)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self.writing, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
