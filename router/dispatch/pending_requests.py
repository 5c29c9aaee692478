"""Requests that wait because no node can take them."""

from __future__ import annotations

MOST_FULL = 64
"""So many wait for room in a cluster that is full; each looks for it a few times a second."""


class PendingRequests:
    """Pending requests of one model's nodes.

    Who waits is counted from `enter` to `leave`, each of which may come again."""

    def __init__(self) -> None:
        self._tokens: dict[object, int] = {}

    def enter(self, who: object, tokens: int) -> None:
        """It waits for a node, which has so many tokens to compute."""
        self._tokens[who] = tokens

    def takes(self, who: object) -> bool:
        """Return whether it may wait, or waits already, in a cluster that is full."""
        return who in self._tokens or self.roomy

    @property
    def roomy(self) -> bool:
        """Return whether another may wait for room."""
        return len(self._tokens) < MOST_FULL

    def leave(self, who: object) -> None:
        """It waits no longer, if it did."""
        self._tokens.pop(who, None)

    @property
    def requests(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> int:
        return sum(self._tokens.values())
