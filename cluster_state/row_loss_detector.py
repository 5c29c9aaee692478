"""RowLossDetector: samples a node's rows; decides to rewrite all rows if the block index has lost any of the sample."""

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
MIN_REWRITE_S, MAX_REWRITE_S = 10.0, 160.0
"""Minimum interval between two rewrites of all rows after losses, in seconds, and the limit to which it doubles.

It doubles while losses repeat, because the store then lacks memory for the rows."""


class RowLossDetector:
    """Detects lost rows while the lease is live: the store ran out of memory, or returned to an older state.

    Every `sample_s` seconds it selects rows to check, and decides when to write all rows again."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s, self._due_at = sample_s, time.monotonic() + sample_s
        self._rewritten_at, self._interval_s = -math.inf, MIN_REWRITE_S

    def sample(self, rows: dict[bytes, None], unwritten: Container[bytes]) -> list[bytes]:
        """Return a sample of the written rows; empty if the next sample is not due yet."""
        now = time.monotonic()
        if now < self._due_at:
            return []
        self._due_at = now + self._sample_s
        span = SAMPLE * GROUP
        begin = random.randrange(max(1, len(rows) - span + 1))
        selected = (*islice(rows, begin, begin + span, GROUP), *islice(reversed(rows), 0, NEWEST * GROUP, GROUP))
        return list(dict.fromkeys(each for each in selected if each not in unwritten))

    def should_rewrite(self, found: int, sampled: int) -> bool:
        """Return whether to write all rows again, after `found` of `sampled` rows were found."""
        now = time.monotonic()
        if found >= sampled or now < self._rewritten_at + self._interval_s:
            return False
        log.warning("%d of %d rows of the block index are lost: writing all of them again", sampled - found, sampled)
        repeated = now < self._rewritten_at + 2 * self._interval_s
        self._rewritten_at, self._interval_s = (
            now,
            min(2 * self._interval_s, MAX_REWRITE_S) if repeated else MIN_REWRITE_S,
        )
        return True
