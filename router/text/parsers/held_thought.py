"""HeldThought: holds what looks like reasoning within an answer's text until a call or other text follows it."""

from __future__ import annotations

from collections.abc import Callable

MAX_CHARS = 16_384
"""Longest held text whose reasoning has not ended, in characters; longer text is shown as it comes."""
MAX_GAP = 256
"""Longest text between the end of reasoning and a call that has not begun, in characters."""


class HeldThought:
    """Text from a mark of reasoning on. It is reasoning if it ends with a mark and a call follows; otherwise text.

    An answer may quote such marks, so text is never taken for reasoning before the call has begun."""

    def __init__(self, ends: tuple[str, ...]) -> None:
        self._ends = ends
        self._longest = max(map(len, ends))
        self.text = ""
        self._end = self._searched = 0
        """Position behind the end mark, 0 if it was not read, and where the search for it goes on."""

    @property
    def is_open(self) -> bool:
        """Return whether the end mark was not read."""
        return not self._end

    def add(self, text: str) -> None:
        """Take more text."""
        self.text += text
        if self._end:
            return
        found = [(at, at + len(mark)) for mark in self._ends if (at := self.text.find(mark, self._searched)) >= 0]
        self._end = min(found, default=(0, 0))[1]
        self._searched = max(0, len(self.text) - self._longest + 1)

    def is_reasoning(self, begins_call: Callable[[str], bool | None], *, ended: bool) -> bool | None:
        """Return whether the text is reasoning; None: more text will tell. ended: there is no more."""
        if self._end:
            follows = begins_call(self.text[self._end :])
            too_far = follows is None and len(self.text) - self._end > MAX_GAP
            return bool(follows) if ended or too_far else follows
        return False if ended or len(self.text) > MAX_CHARS else None

    def as_text(self, begins: tuple[str, ...]) -> tuple[str, str]:
        """Return the part that is text for sure, and the rest, which may hold calls: all behind the first mark."""
        end = self._end or max(len(mark) for mark in begins if self.text.startswith(mark))
        return self.text[:end], self.text[end:]
