"""StopMatcher: finds stop strings across token boundaries, and never emits a part of a match."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Incremental matcher: feed it text, and it returns the text that may be shown.

    The match is the stop string that ends first, and among those the one that begins first. The result therefore
    depends only on the text, not on its cuts. `matched` is then set, and later text is dropped. Text is held back only
    while it may become a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), stops
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._overlap = max(map(len, stops), default=1) - 1
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; return what can be shown now."""
        if self.matched is not None:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return the text held back, at the end or when it must be shown anyway."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        for at in range(max(0, len(text) - self._overlap), len(text)):
            if text[at] in self._starts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
