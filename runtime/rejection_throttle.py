"""Throttle of the rejections to clients whose requests keep being rejected, so that they do not slow other requests.

A rejection is cheap, but thousands per second delay the first tokens of other requests. So the rejected requests of one
source may take SHARE of the loop's time; beyond that, their rejections are delayed. Valid requests of the source are
never delayed, since other clients may share its address. No rejection is delayed while the server is otherwise idle.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

SHARE = 0.1
"""Share of the loop's time that the rejected requests of one source may take."""
CREDIT_S = 0.2
"""Loop time that rejected requests of a source may take in a burst after a pause, in seconds."""
MAX_DELAY_S = 5.0
"""Maximum delay of a rejection, in seconds, so that clients do not take it for a router that hangs."""
MIN_COST_S, MAX_COST_S = 0.0003, 0.1
"""Bounds of the loop time charged to a rejected request, in seconds; its measured time may include other work."""
BUSY_S = 5.0
"""Time for which the loop counts as busy after it served a request, in seconds."""
SOURCES = 4096
"""Maximum number of tracked sources; the one rejected longest ago is dropped first."""


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
        cost = min(max(took_s, MIN_COST_S), MAX_COST_S)
        self._free_at[source] = min(begins + cost / SHARE, now + MAX_DELAY_S)
        if len(self._free_at) > SOURCES:
            self._free_at.popitem(last=False)
        return max(0.0, begins - now) if now < self._served + BUSY_S else 0.0
