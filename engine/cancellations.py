"""Pending cancellations, visible in the middle of a step.

The engine takes commands only between steps, and a step may be long."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.engine.request import Key


class Cancellations:
    """Announced cancellations.

    Written under the lock of the engine's inbox; the engine thread reads them without it."""

    def __init__(self) -> None:
        self._upto: dict[str, int] = {}

    def announce(self, request_id: str, attempt: int) -> None:
        """Announce that all attempts of the request up to `attempt` will be dropped before the next step."""
        self._upto[request_id] = max(attempt, self._upto.get(request_id, -1))

    def forget(self) -> None:
        """Forget all announcements: the engine now takes the commands that drop those attempts."""
        self._upto.clear()

    def includes(self, keys: Iterable[Key]) -> bool:
        """Return whether all of them are leaving."""
        return bool(self._upto) and all(self._upto.get(request_id, -1) >= attempt for request_id, attempt in keys)
