"""Detection of a node's rows that the block index has lost, by samples, for example after a Redis restart."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Container
from itertools import islice

from kvferry.protocol.index_rows import GROUP

log = logging.getLogger("kvferry.index")

SAMPLE, NEWEST = 8, 8
"""Number of rows sampled at once: SAMPLE from a random position, and NEWEST of the latest ones.

A store that returns to an older state loses the newest rows. Sampled rows are GROUP apart, because rows that share a
key are mostly lost together."""
MEND_S, MAX_MEND_S = 10.0, 160.0
"""Seconds between two rewrites of all rows after losses, and the limit to which the interval doubles.

It doubles while rows are lost again and again, because the store then lacks memory for them."""


class RowLossDetector:
    """Detects lost rows while the lease is live: the store ran out of memory, or returned to an older state.

    Every `sample_s` seconds it selects rows to look for, and decides when to write all rows again."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s, self._due_at = sample_s, time.monotonic() + sample_s
        self._mended_at, self._mend_s = -math.inf, MEND_S

    def sample(self, rows: dict[bytes, None], unwritten: Container[bytes]) -> list[bytes]:
        """Return a sample of the written rows; empty if the next sample is not due yet."""
        now = time.monotonic()
        if now < self._due_at:
            return []
        self._due_at = now + self._sample_s
        span = SAMPLE * GROUP
        begin = random.randrange(max(1, len(rows) - span + 1))
        looked = (*islice(rows, begin, begin + span, GROUP), *islice(reversed(rows), 0, NEWEST * GROUP, GROUP))
        return list(dict.fromkeys(each for each in looked if each not in unwritten))

    def mend(self, found: int, asked: int) -> bool:
        """Return whether to write all rows again, after `found` of `asked` sampled rows were found."""
        now = time.monotonic()
        if found >= asked or now < self._mended_at + self._mend_s:
            return False
        log.warning("%d of %d rows of the block index are lost: writing all of them again", asked - found, asked)
        again = now < self._mended_at + 2 * self._mend_s
        self._mended_at, self._mend_s = now, min(2 * self._mend_s, MAX_MEND_S) if again else MEND_S
        return True
