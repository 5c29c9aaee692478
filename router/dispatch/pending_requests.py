"""PendingRequests: bounded count of requests of a model that wait because no node can take them."""

from __future__ import annotations

MAX_WAITING = 64
"""Largest number of requests that wait in a full cluster; each retries placement a few times a second."""


class PendingRequests:
    """Waiting requests of one model, with their tokens.

    A request counts from `enter` to `leave`; both may be called repeatedly."""

    def __init__(self) -> None:
        self._tokens: dict[object, int] = {}

    def enter(self, request: object, tokens: int) -> None:
        """Count a request that waits for a node, with `tokens` to compute."""
        self._tokens[request] = tokens

    def takes(self, request: object) -> bool:
        """Return whether the request may wait, or already waits, in a full cluster."""
        return request in self._tokens or self.has_room

    @property
    def has_room(self) -> bool:
        """Return whether another request may wait."""
        return len(self._tokens) < MAX_WAITING

    def leave(self, request: object) -> None:
        """Remove the request if it waits."""
        self._tokens.pop(request, None)

    @property
    def requests(self) -> int:
        """Return the number of waiting requests."""
        return len(self._tokens)

    @property
    def tokens(self) -> int:
        """Return the tokens of all waiting requests."""
        return sum(self._tokens.values())
