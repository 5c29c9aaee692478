"""Accuracy of a cache mirror: predicted against actual reuse of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvferry.engine_adapter.cache_mirror import CacheMirror
from kvferry.protocol.media import MediaItem

MAX_CALLS = 8192
"""Most calls whose end is waited for; the oldest ones are forgotten."""


class MirrorAccuracy:
    """Compares what a mirror holds when a call is sent with what the engine then says it reused.

    calls       calls compared
    predicted   prompt tokens that the mirror held, over all of them
    actual      prompt tokens that the engine reused
    difference  sum of the absolute differences, in tokens"""

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._expected: OrderedDict[Hashable, int] = OrderedDict()
        self.calls = self.predicted = self.actual = self.difference = 0

    def sent(
        self,
        call: Hashable,
        token_ids: Sequence[int],
        namespace: str = "",
        adapter: str = "",
        media: Sequence[MediaItem] = (),
    ) -> int:
        """Record a call that goes to the engine now; return the tokens that it should reuse."""
        self._expected[call] = held = self._mirror.held(token_ids, namespace, adapter, media)
        while len(self._expected) > MAX_CALLS:
            self._expected.popitem(last=False)
        return held

    def ended(self, call: Hashable, cached_tokens: int | None) -> None:
        """Compare a call that ended. cached_tokens: what the engine says; None: it said nothing."""
        expected = self._expected.pop(call, None)
        if expected is None or cached_tokens is None:
            return
        self.calls += 1
        self.predicted += expected
        self.actual += cached_tokens
        self.difference += abs(expected - cached_tokens)
