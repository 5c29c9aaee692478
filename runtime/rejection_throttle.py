"""Throttle for clients whose requests keep being rejected.

A refusal is cheap, but thousands a second are not: first tokens of others wait behind them. So what refused requests of
one source take of the loop may be SHARE of it; for more, the refusals wait. Nothing else of the source does, for others
may come from the same address: what can be served is served at once. While nobody is served, nobody has to wait.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

SHARE = 0.1
"""Of the loop's time, for one source's refused requests."""
CREDIT_S = 0.2
"""What they may take at once after a pause."""
PATIENCE_S = 5.0
"""The longest wait of a refusal: clients that do not mean it should not take it for a router that hangs."""
LEAST_S, MOST_S = 0.0003, 0.1
"""What a refused request counts as at least, and at most: it may have waited for others."""
BUSY_S = 5.0
"""For which somebody who was served may be back."""
SOURCES = 4096


class RejectionThrottle:
    """Rejection throttle of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served = -BUSY_S
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def served(self) -> None:
        """Some request was worth its while."""
        self._served = self._clock()

    def delay_s(self, source: str, took_s: float) -> float:
        """Seconds that a refusal has to wait, of a request that took so many."""
        now = self._clock()
        begins = max(self._free_at.pop(source, 0.0), now - CREDIT_S / SHARE)
        cost = min(max(took_s, LEAST_S), MOST_S)
        self._free_at[source] = min(begins + cost / SHARE, now + PATIENCE_S)
        if len(self._free_at) > SOURCES:
            self._free_at.popitem(last=False)
        return max(0.0, begins - now) if now < self._served + BUSY_S else 0.0
