"""RetryBudget: token bucket that bounds retries and hedges to a share of all requests."""

from __future__ import annotations

import time
from collections.abc import Callable


class RetryBudget:
    """Token bucket filled by `share` per request and `floor_per_s` per second, up to `burst` retries.

    requests   number of requests so far, incremented by the owner
    """

    def __init__(
        self, share: float, floor_per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = 0
        self._share, self._floor, self._burst, self._clock = share, floor_per_s, burst, clock
        self._left, self._counted, self._at = burst, 0, clock()

    def spend(self) -> bool:
        """Take one retry from the bucket; return whether there was one."""
        now = self._clock()
        earned = self._share * (self.requests - self._counted) + self._floor * (now - self._at)
        self._left, self._counted, self._at = min(self._burst, self._left + earned), self.requests, now
        if self._left < 1:
            return False
        self._left -= 1
        return True
