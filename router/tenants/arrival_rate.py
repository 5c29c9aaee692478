"""ArrivalRate: ratio of arriving to starting sequences, with exponential decay, for autoscaling."""

from __future__ import annotations

import math

MEMORY_S = 15.0
"""Time constant of the exponential decay of older sequences, in seconds."""


class ArrivalRate:
    """Recent arrival rate of sequences."""

    def __init__(self) -> None:
        self._came = self._begun = self._at = 0.0

    def came(self, sequences: int, now: float) -> None:
        """Count arriving sequences at time `now`."""
        self._pass(now)
        self._came += sequences

    def began(self, sequences: int, now: float) -> None:
        """Count starting sequences at time `now`."""
        self._pass(now)
        self._begun += sequences

    @property
    def ratio(self) -> float:
        """Return arrivals divided by starts: above 1 the queue grows; 1 without arrivals, infinite without starts."""
        if not self._came:
            return 1.0
        return self._came / self._begun if self._begun else math.inf

    def _pass(self, now: float) -> None:
        fade = math.exp((self._at - now) / MEMORY_S)
        self._came, self._begun, self._at = self._came * fade, self._begun * fade, now
