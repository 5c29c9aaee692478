"""Counts the output tokens of a response that passes through, and the time between them."""

from __future__ import annotations

import re
import time

TAIL_BYTES = 8192
"""Bytes at the end of a response that are searched for its usage."""
_EVENT = b"\ndata: {"
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')


class ResponseMeter:
    """Counter of a response's tokens, from its usage if it has one, else one token for each event.

    Names of fields within generated text have escaped quotes, so that they are not found."""

    def __init__(self) -> None:
        self._tail = b"\n"
        self._events = 0
        self._first_at = self._last_at = 0.0

    def take(self, data: bytes) -> None:
        """Read the next part of the body."""
        seam = self._tail[1 - len(_EVENT) :] + data
        if more := seam.count(_EVENT):
            self._last_at = time.monotonic()
            self._first_at = self._first_at or self._last_at
            self._events += more
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    @property
    def output(self) -> int:
        """Return the output tokens so far."""
        found = _last(_OUTPUT, self._tail)
        return self._events if found is None else found

    def itl_s(self, sequences: int) -> float:
        """Return the mean seconds between the tokens of a stream of so many sequences; 0 if unknown."""
        later = self.output / sequences - 1
        return (self._last_at - self._first_at) / later if later > 0 else 0.0

    @property
    def cached(self) -> int | None:
        """Return the prompt tokens that the engine reused; None if it does not report them."""
        return _last(_CACHED, self._tail)


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
