"""Common beginnings and ends of texts that a template wrote, never cut within a mark or a word."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNIT = re.compile(r"</?[^<>\s\ue000-\ue00f]+>|\[/?[A-Z_]+\]|\w+")
"""Units that no comparison may cut: a mark in brackets, or a word."""


def shared_start(*texts: str) -> int:
    """Return the length of the texts' common beginning."""
    at = _shared(texts)
    while cut := min((begun for text in texts if (begun := _unit_around(text, at)) >= 0), default=-1) + 1:
        at = cut - 1
    return at


def shared_end(*texts: str) -> int:
    """Return the length of the texts' common end."""
    size = _shared([text[::-1] for text in texts])
    while size and any(_unit_around(text, len(text) - size) >= 0 for text in texts):
        size -= 1
    return size


def first_unit(text: str) -> str:
    """Return the mark with which a text begins, or its beginning up to a blank or a placeholder."""
    found = _UNIT.match(text)
    if found is not None and text[0] in "<[":
        return found[0]
    return re.split(r"[\s\ue000-\ue00f]", text, maxsplit=1)[0]


def last_unit(text: str) -> str:
    """Return the mark with which a text ends, or its last line."""
    line = text.rpartition("\n")[2]
    found = [each for each in _UNIT.finditer(line) if each.end() == len(line) and each[0][0] in "<["]
    return found[-1][0] if found else line


def _shared(texts: Sequence[str]) -> int:
    """Return the length of the texts' common beginning, in characters."""
    first, last = min(texts, default=""), max(texts, default="")
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def _unit_around(text: str, at: int) -> int:
    """Return where the unit that contains `at` begins; -1 if `at` is between units."""
    for found in _UNIT.finditer(text):
        if found.start() >= at:
            break
        if found.end() > at:
            return found.start()
    return -1
