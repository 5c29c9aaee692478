"""What tiers tell of their blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def blocks(rows: Iterable[bytes]) -> list[bytes]:
    """Hashes that end in eight zeros, by their rows."""
    return [row[9:] + bytes(8) if row[0] else row[1:] for row in rows]


class Overtaken:
    """Hears of blocks, which another thread drops in the moment in which they are told to be there. told: in words."""

    def __init__(self, drop: Callable[[], object]) -> None:
        self.told: list[str] = []
        self._dropping = threading.Thread(target=drop)

    def changed(self, stored: Any, removed: Any) -> None:
        if stored:
            self._dropping.start()
            self._dropping.join(0.5)  # it is behind this
        self.told.append("here" if stored else "gone")

    def ended(self) -> list[str]:
        """What was told, once the other thread is through."""
        self._dropping.join(10)
        return self.told
