"""Deadlines of attempts: ends those whose requester has given them up."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.engine.request import Request

LATE_S = 1.0
"""Behind a deadline, which the attempt's router notices first; and between two looks."""


class Deadlines:
    """Ends requests whose deadline has passed."""

    def __init__(self) -> None:
        self._look_at = 0.0

    def late(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests to drop; empty where the last check was a moment ago.

        Empty where the last look was a moment ago."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + LATE_S
        return [request for request in requests if now > request.arrived + request.job.deadline_s + LATE_S]
