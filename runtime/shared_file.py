"""Shared memory for a model's weights, which one process writes once and all processes of a machine read.

It is an anonymous file (memfd): it uses no file system, only processes that got its descriptor can open it, and it is
freed with the last of them. The writer seals it when it is complete; after that the kernel rejects writes. Readers
ignore unsealed content. If a writer dies, the next process becomes the writer and starts from an empty file.
"""

from __future__ import annotations

import fcntl
import os
import time

_POLL_S = 0.05
STALLED_S = 600.0
"""Seconds without progress of the writer (a slow disk may take long for one tensor) after which readers give up."""


def make() -> int:
    """Return a descriptor of new shared memory for its processes to inherit; -1 if the system has no sealed memfd."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1


class SharedFile:
    """One process's access to the memory of `make`. The constructor raises OSError if the descriptor is not open."""

    def __init__(self, descriptor: int) -> None:
        self._path, self._writes = f"/proc/self/fd/{descriptor}", False
        self.writing = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        """Descriptor that this process opened itself, so that its locks are its own: inherited ones share locks."""

    @property
    def whole(self) -> bool:
        """Return whether the file is complete and sealed."""
        return bool(fcntl.fcntl(self.writing, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self.writing).st_size

    def take_turn(self, stalled_s: float = STALLED_S) -> bool:
        """Wait for the file: return False once it is sealed, or True once this process is the writer of an empty file.

        The turn ends with `seal`, `close` or the process. Raises TimeoutError if another writer makes no progress for
        stalled_s seconds."""
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
                raise TimeoutError(f"no progress for {stalled_s:.0f} s")
            time.sleep(_POLL_S)
        fcntl.flock(self.writing, fcntl.LOCK_UN)
        return False

    def seal(self) -> None:
        """Seal the complete file and end this process's turn. Raises OSError if a writable mapping of it exists."""
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self.writing, fcntl.F_ADD_SEALS, seals)
        self._writes = False
        fcntl.flock(self.writing, fcntl.LOCK_UN)

    def reader(self) -> int:
        """Return a read-only descriptor, which the caller closes; some kernels map a sealed file only through such."""
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file and end this process's turn; drops everything written but not sealed."""
        if self._writes:
            os.ftruncate(self.writing, 0)
        os.close(self.writing)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self.writing, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
