"""Accuracy of a cache mirror: predicted against actual reuse of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvferry.engine_adapter.cache_mirror import CacheMirror
from kvferry.protocol.media import MediaItem

MAX_CALLS = 8192
"""Most calls whose end is waited for; the oldest ones are forgotten."""
MISSES = 3
"""Calls in a row that found nothing of what the mirror held: so many do not come from evictions."""


class MirrorAccuracy:
    """Compares what a mirror holds when a call is sent with what the engine then says it reused.

    calls       calls compared
    predicted   prompt tokens that the mirror held, over all of them
    actual      prompt tokens that the engine reused
    difference  sum of the absolute differences, in tokens
    misses      newest calls in a row for which the mirror held blocks, and the engine reused nothing"""

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._expected: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self.calls = self.predicted = self.actual = self.difference = self.misses = 0

    def sent(
        self,
        call: Hashable,
        token_ids: Sequence[int],
        namespace: str = "",
        adapter: str = "",
        media: Sequence[MediaItem] = (),
    ) -> int:
        """Record a call that goes to the engine now; return the tokens that it should reuse."""
        held = self._mirror.held(token_ids, namespace, adapter, media)
        self._expected[call] = held, self._mirror.clears
        while len(self._expected) > MAX_CALLS:
            self._expected.popitem(last=False)
        return held

    def ended(self, call: Hashable, cached_tokens: int | None) -> None:
        """Compare a call that ended. cached_tokens: what the engine says; None: it said nothing."""
        found = self._expected.pop(call, None)
        if found is None or cached_tokens is None:
            return
        expected, clears = found
        self.calls += 1
        self.predicted += expected
        self.actual += cached_tokens
        self.difference += abs(expected - cached_tokens)
        if expected and clears == self._mirror.clears:  # else the engine has told of the reset meanwhile
            self.misses = 0 if cached_tokens else self.misses + 1

    @property
    def is_stale(self) -> bool:
        """Return whether the engine must have dropped its cache without an event."""
        return self.misses >= MISSES
