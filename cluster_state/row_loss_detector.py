"""Detection of a node's rows that are missing from the block index, for example after a Redis restart."""

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
"""Rows that are looked for at once: some anywhere, and some of those written last, which a store loses that goes back
to an older state. Each is GROUP from the next one, for what shares a key is mostly lost together."""
MEND_S, LONGEST_MEND_S = 10.0, 160.0
"""Between two times that all rows are written again since some were lost, and what it doubles to while they are lost
again and again: the store has no room for them."""


class RowLossDetector:
    """Rows may be lost while the lease lives: the store was short of memory, or went back to an older state.

    Says every `sample_s` which rows to look for, and when to write all of them again."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s, self._due_at = sample_s, time.monotonic() + sample_s
        self._mended_at, self._mend_s = -math.inf, MEND_S

    def sample(self, rows: dict[bytes, None], unwritten: Container[bytes]) -> list[bytes]:
        """Some of the rows that were written; none before it is time again."""
        now = time.monotonic()
        if now < self._due_at:
            return []
        self._due_at = now + self._sample_s
        span = SAMPLE * GROUP
        begin = random.randrange(max(1, len(rows) - span + 1))
        looked = (*islice(rows, begin, begin + span, GROUP), *islice(reversed(rows), 0, NEWEST * GROUP, GROUP))
        return list(dict.fromkeys(each for each in looked if each not in unwritten))

    def mend(self, found: int, asked: int) -> bool:
        """Of a sample so many were found. Whether all rows are to be written again now."""
        now = time.monotonic()
        if found >= asked or now < self._mended_at + self._mend_s:
            return False
        log.warning("%d of %d rows of the block index are lost: all are written again", asked - found, asked)
        again = now < self._mended_at + 2 * self._mend_s
        self._mended_at, self._mend_s = now, min(2 * self._mend_s, LONGEST_MEND_S) if again else MEND_S
        return True
