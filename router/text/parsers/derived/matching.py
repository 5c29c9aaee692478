"""Matches a text with placeholders from a derived syntax against partial model output, tolerant of blanks."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from kvferry.router.text.parsers.derived.syntax import ID, INDEX, NAME

_ID = re.compile(r"[\w.:|-]{0,128}")
_DIGITS = re.compile(r"\d{0,9}")
_OPENS, _CLOSES = "<[{(", '>]})",'
_BREAKS = frozenset("<[{(>]}),:")
"""Signs after which blanks may precede a name."""


@dataclass(frozen=True, slots=True)
class Match:
    """A match: where it ended, and the name that it held. `end` < 0: no match so far; more text may help if `waits`."""

    end: int = -1
    name: str = ""
    waits: bool = False

    @property
    def found(self) -> bool:
        """Return whether the whole text was matched."""
        return self.end >= 0


NONE, WAIT = Match(), Match(waits=True)


def match(pattern: str, text: str, at: int = 0, names: Collection[str] = (), name: str = "") -> Match:
    """Match a description's text at this place; blanks may be missing or added where they cannot be a value's.

    names: names of the tools. name: the called tool's, if it was read before."""
    place, size = 0, len(pattern.rstrip())
    while place < size:
        sign = pattern[place]
        if sign.isspace():
            place += 1
            at = _blanks(text, at)
        elif sign == NAME:
            at = _blanks(text, at) if pattern[place - 1 : place] in _BREAKS else at
            found = _name(text, at, (name,) if name else names)
            if not found.found:
                return found
            at, name, place = found.end, found.name, place + 1
        elif sign in (ID, INDEX):
            end = _free(_ID if sign == ID else _DIGITS, text, at, pattern[place + 1 : place + 2])
            if end < 0:
                return WAIT if end == -2 else NONE
            at, place = end, place + 1
        elif at == len(text):
            return WAIT
        elif text[at] == sign:
            at, place = at + 1, place + 1
        elif text[at].isspace() and (sign in _OPENS or (place and pattern[place - 1] in _CLOSES)):
            at += 1
        else:
            return NONE
    return Match(_blanks(text, at) if size < len(pattern) else at, name)


def _blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _name(text: str, at: int, names: Collection[str]) -> Match:
    """Match one of the names, the longest that fits."""
    rest = text[at : at + max(map(len, names), default=0)]
    longest = max((each for each in names if rest.startswith(each)), key=len, default="")
    if any(len(each) > len(rest) and each.startswith(rest) for each in names):
        return WAIT
    return Match(at + len(longest), longest) if longest else NONE


def _free(pattern: re.Pattern[str], text: str, at: int, following: str) -> int:
    """Return the last end of an id that `following` can follow; -1: there is none, -2: more text is needed."""
    found = pattern.match(text, at)
    end = at if found is None else found.end()
    if end == len(text):
        return -2
    while following and end > at and text[end] != following:
        end -= 1
    return end if not following or text[end] == following or following.isspace() else -1
