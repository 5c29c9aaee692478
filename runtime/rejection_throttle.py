"""Throttle for clients whose requests keep being rejected.

A rejection is cheap, but thousands a second delay the first tokens of other requests. So the rejected requests of one
source may take SHARE of the loop's time; beyond that, their rejections are delayed. Valid requests of the source are
never delayed, since other clients may share its address. No rejection is delayed while no request is being served.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

SHARE = 0.1
"""Share of the loop's time that the rejected requests of one source may take."""
CREDIT_S = 0.2
"""Loop time that they may take in a burst after a pause, in seconds."""
PATIENCE_S = 5.0
"""Longest delay of a rejection, in seconds: well-meaning clients must not take it for a router that hangs."""
LEAST_S, MOST_S = 0.0003, 0.1
"""Bounds of the loop time charged to a rejected request, in seconds: its measured time may include waits for others."""
BUSY_S = 5.0
"""Time for which the loop counts as busy after it served a request, in seconds."""
SOURCES = 4096
"""Most sources that are tracked; the one rejected longest ago is dropped first."""


class RejectionThrottle:
    """Rejection throttle of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served = -BUSY_S
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def served(self) -> None:
        """Record that a request was served."""
        self._served = self._clock()

    def delay_s(self, source: str, took_s: float) -> float:
        """Return the delay of a rejection in seconds; took_s: loop time of the rejected request."""
        now = self._clock()
        begins = max(self._free_at.pop(source, 0.0), now - CREDIT_S / SHARE)
        cost = min(max(took_s, LEAST_S), MOST_S)
        self._free_at[source] = min(begins + cost / SHARE, now + PATIENCE_S)
        if len(self._free_at) > SOURCES:
            self._free_at.popitem(last=False)
        return max(0.0, begins - now) if now < self._served + BUSY_S else 0.0
