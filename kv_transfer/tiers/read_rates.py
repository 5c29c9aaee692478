"""Measured read time per block of a tier, and the number of blocks that wait to be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_RATE = 500e6
"""Expected rate of a read in bytes per second, until one was measured."""
ENOUGH = 256
"""Number of blocks of a read that counts half in the average. Smaller reads count less: fixed costs dominate them."""
HANGS_S = 5.0
"""Seconds after which a running read counts as hanging."""
FORGET_S = 30.0
"""Half-life of a measured slowdown, in seconds without reads.

Without it, the tier would never be used again after one slow read."""


class ReadRates:
    """Average read time per block. Thread-safe. Reads run one at a time.

    waiting   number of blocks requested and not read yet
    """

    def __init__(self, block_bytes: int, clock: Callable[[], float] = time.monotonic, rate: float = FIRST_RATE) -> None:
        """Start with an expected rate, in bytes per second."""
        self._first_s = self._block_s = block_bytes / rate
        self._clock, self._at = clock, clock()
        self._lock = threading.Lock()
        self._began: float | None = None
        self.waiting = 0

    @property
    def hangs(self) -> bool:
        """Return whether the running read takes longer than HANGS_S."""
        began = self._began
        return began is not None and self._clock() > began + HANGS_S

    def seconds(self, blocks: int) -> float:
        """Return the expected time to read this many blocks, in seconds."""
        slower = max(0.0, self._block_s - self._first_s)
        kept: float = 0.5 ** ((self._clock() - self._at) / FORGET_S)
        return blocks * (self._block_s - slower * (1 - kept))

    def enqueue(self, blocks: int) -> None:
        """Add to the blocks requested; a negative number takes a request back."""
        with self._lock:
            self.waiting += blocks

    def begun(self) -> None:
        """Record that a read starts."""
        self._began = self._clock()

    def ended(self, blocks: int, seconds: float = 0.0) -> None:
        """Record that a read ended after `seconds`; 0 if it failed."""
        now_s = self.seconds(1)
        with self._lock:
            self.waiting -= blocks
            self._began = None
            if seconds > 0:
                self._block_s = now_s + blocks / (blocks + ENOUGH) * (seconds / blocks - now_s)
                self._at = self._clock()
