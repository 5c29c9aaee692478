"""Cancellations that arrive during a step, which may stop it early, and Deadlines, which finds overdue requests.

The engine takes commands only between steps, and a step may be long."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.engine.request import Key, Request


class Cancellations:
    """Announced cancellations.

    Written under the lock of the engine's inbox; the engine thread reads them without it."""

    def __init__(self) -> None:
        self._upto: dict[str, int] = {}
        self._all = False

    def announce_all(self) -> None:
        """Announce that all attempts of all requests will be dropped before the next step."""
        self._all = True

    def announce(self, request_id: str, attempt: int) -> None:
        """Announce that all attempts of the request up to `attempt` will be dropped before the next step."""
        self._upto[request_id] = max(attempt, self._upto.get(request_id, -1))

    def forget(self) -> None:
        """Forget all announcements: the engine now takes the commands that drop those attempts."""
        self._upto.clear()
        self._all = False

    def includes(self, keys: Iterable[Key]) -> bool:
        """Return whether all of these attempts are announced."""
        leaving = self._upto
        return self._all or (bool(leaving) and all(leaving.get(name, -1) >= attempt for name, attempt in keys))


LATE_S = 1.0
"""Grace period after a deadline, which the attempt's router notices first, and interval of the check, in seconds."""


class Deadlines:
    """Check that ends requests whose deadline has passed."""

    def __init__(self) -> None:
        self._check_at = 0.0

    def late(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests to drop; empty if the last check was a moment ago."""
        now = time.monotonic()
        if now < self._check_at:
            return []
        self._check_at = now + LATE_S
        return [request for request in requests if now > request.arrived + request.job.deadline_s + LATE_S]
