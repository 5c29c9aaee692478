"""ArrivalRate: ratio of arriving to starting sequences, with exponential decay, for autoscaling."""

from __future__ import annotations

import math

DECAY_S = 15.0
"""Time constant of the exponential decay of older sequences, in seconds."""


STEP_S = 0.01
"""Shortest time for which the decay is computed, in seconds: not twice for each request of a busy router."""


class ArrivalRate:
    """Recent arrival rate of sequences."""

    def __init__(self) -> None:
        self._arrived = self._started = self._at = 0.0

    def arrived(self, sequences: int, now: float) -> None:
        """Count arriving sequences at time `now`."""
        self._decay(now)
        self._arrived += sequences

    def started(self, sequences: int, now: float) -> None:
        """Count starting sequences at time `now`."""
        self._decay(now)
        self._started += sequences

    @property
    def ratio(self) -> float:
        """Return arrivals divided by starts: above 1 the queue grows; 1 without arrivals, infinite without starts."""
        if not self._arrived:
            return 1.0
        return self._arrived / self._started if self._started else math.inf

    def _decay(self, now: float) -> None:
        if now - self._at < STEP_S:
            return
        factor = math.exp((self._at - now) / DECAY_S)
        self._arrived, self._started, self._at = self._arrived * factor, self._started * factor, now
