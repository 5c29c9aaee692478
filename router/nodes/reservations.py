"""Reservations: one router's reserved tokens, blocks and requests on a node, and the node's load including them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

LEASE_LAG_POLLS = 3
"""Number of polls for which a lease may lag behind (leases are renewed every second, polled twice a second)."""


class Reservations:
    """Sums of one node's reservations (tokens, blocks, requests), and their peak since the lease may have been written.

    A lease counts all routers' requests as they were up to `LEASE_LAG_POLLS` polls ago. The excess over this router's
    own peak of that time belongs to other routers: total = max(0, leased - own peak) + own now."""

    def __init__(self) -> None:
        self._now = (0, 0, 0)
        self._peak = (0, 0, 0)
        self._history: deque[tuple[int, int, int]] = deque(maxlen=LEASE_LAG_POLLS)
        self._leased_peak = (0, 0, 0)

    @property
    def empty(self) -> bool:
        """Return whether nothing is reserved."""
        return self._now == (0, 0, 0)

    def add(self, tokens: int, blocks: int, requests: int) -> None:
        """Add to the sums; negative amounts release."""
        now, peak = self._now, self._peak
        tokens, blocks, requests = self._now = (now[0] + tokens, now[1] + blocks, now[2] + requests)
        if tokens > peak[0] or blocks > peak[1] or requests > peak[2]:
            self._peak = (max(tokens, peak[0]), max(blocks, peak[1]), max(requests, peak[2]))

    def next_poll(self) -> None:
        """Begin the next poll's peak after a read of the lease."""
        if self._peak == self._leased_peak == (0, 0, 0):
            return
        self._history.append(self._peak)
        self._leased_peak = _maxima(self._history)
        self._peak = self._now

    def counted(self, tokens: int, blocks: int, requests: int) -> tuple[int, int, int]:
        """Return the lease's figures plus the reservations that it does not count yet."""
        own, peak = self._now, self._leased_peak
        return (
            max(0, tokens - peak[0]) + own[0],
            max(0, blocks - peak[1]) + own[1],
            max(0, requests - peak[2]) + own[2],
        )


def _maxima(sums: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    tokens, blocks, requests = (max(column) for column in zip(*sums, strict=True))
    return (tokens, blocks, requests)
