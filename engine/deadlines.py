"""Deadlines of attempts: ends those whose router has given them up."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.engine.request import Request

LATE_S = 1.0
"""Grace period after a deadline, which the attempt's router notices first, and interval of the check, in seconds."""


class Deadlines:
    """Check that ends requests whose deadline has passed."""

    def __init__(self) -> None:
        self._look_at = 0.0

    def late(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests to drop; empty if the last check was a moment ago."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + LATE_S
        return [request for request in requests if now > request.arrived + request.job.deadline_s + LATE_S]
