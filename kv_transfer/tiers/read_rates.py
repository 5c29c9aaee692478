"""Learned read time per block of a tier, and its backlog of reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_RATE = 500e6
"""Bytes a second that a read is expected to bring before there was one."""
ENOUGH = 256
"""Blocks of a read that counts half; a smaller one tells more of its beginning than of its pace."""
HANGS_S = 5.0
"""For which a read is waited before the disk counts as one that does not answer."""
FORGET_S = 30.0
"""In which half of what is slower than at first is forgotten, while nothing is read: else one that hung were the
last."""


class ReadRates:
    """From any thread. Reads count one after another, as they are made.

    waiting   blocks that were asked for and have not come
    """

    def __init__(self, block_bytes: int, clock: Callable[[], float] = time.monotonic, rate: float = FIRST_RATE) -> None:
        """rate: bytes a second that a read is expected to bring before there was one."""
        self._first_s = self._block_s = block_bytes / rate
        self._clock, self._at = clock, clock()
        self._lock = threading.Lock()
        self._began: float | None = None
        self.waiting = 0

    @property
    def hangs(self) -> bool:
        """Return whether nothing comes of what was asked for."""
        began = self._began
        return began is not None and self._clock() > began + HANGS_S

    def seconds(self, blocks: int) -> float:
        """Return the expected seconds of reading so many blocks."""
        slower = max(0.0, self._block_s - self._first_s)
        kept: float = 0.5 ** ((self._clock() - self._at) / FORGET_S)
        return blocks * (self._block_s - slower * (1 - kept))

    def asked(self, blocks: int) -> None:
        with self._lock:
            self.waiting += blocks

    def begun(self) -> None:
        """One is made now."""
        self._began = self._clock()

    def ended(self, blocks: int, seconds: float = 0.0) -> None:
        """They came in this time; 0: they did not."""
        now_s = self.seconds(1)
        with self._lock:
            self.waiting -= blocks
            self._began = None
            if seconds > 0:
                self._block_s = now_s + blocks / (blocks + ENOUGH) * (seconds / blocks - now_s)
                self._at = self._clock()
