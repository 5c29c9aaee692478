"""Reads argument literals: Python's, JSON's, and those with bare keys or a model's own quotes, such as Gemma's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 50
"""Largest nesting depth, since the reader is recursive."""
MAX_BLANKS = 80
"""Blanks after a string that may precede the sign by which its end is known, in characters."""
_NUMBER = re.compile(r"[+-]?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?(?![\w.])")
_WORD = re.compile(r"[\w.-]{1,256}")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}
_PARTNERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Quotes:
    """Marks around strings: a model's `own` ones, with escape sequences if `escaped`; and JSON's and Python's."""

    own: tuple[str, str] = ('"', '"')
    escaped: bool = True

    def opened(self, text: str, at: int) -> tuple[str, str, bool] | None:
        """Return the marks of the string that begins here, and whether it has escape sequences."""
        if text.startswith(self.own[0], at):
            return *self.own, self.escaped
        return (text[at], text[at], True) if text[at : at + 1] in ('"', "'") and text[at : at + 1] else None

    def end(self, text: str, start: int, opened: tuple[str, str, bool], at: int = 0) -> int:
        """Return where a string's closing mark begins, from `at` on; the string begins at `start`. -1: it is not there.

        Without escape sequences, a mark of one character closes the string only before a sign that follows strings."""
        _, close, escaped = opened
        at = max(at, start)
        while (found := text.find(close, at)) >= 0:
            is_ambiguous = len(close) == 1 and not _follows_string(text, found + 1)
            if not (_is_escaped(text, start, found) if escaped else is_ambiguous):
                return found
            at = found + 1
        return -1


def _is_escaped(text: str, start: int, at: int) -> bool:
    slashes = 0
    while at - slashes > start and text[at - slashes - 1] == "\\":
        slashes += 1
    return slashes % 2 == 1


def _follows_string(text: str, at: int) -> bool:
    rest = text[at : at + MAX_BLANKS].lstrip()
    return not rest or rest[0] in ",)]}:"


def arguments(text: str, assign: str, quotes: Quotes) -> dict[str, Any] | None:
    """Return the arguments within the brackets of a call; None if the text is not valid arguments."""
    try:
        reader = _Reader(text, quotes)
        return reader.pairs("", assign.strip())
    except (ValueError, IndexError):
        return None


def literal(text: str, quotes: Quotes) -> tuple[bool, Any]:
    """Return whether the text is a literal, and its value."""
    try:
        reader = _Reader(text, quotes)
        value = reader.value(0)
        return reader.ended, value
    except (ValueError, IndexError):
        return False, None


class _Reader:
    """Recursive reader of one text; raises ValueError or IndexError if it is not a literal."""

    def __init__(self, text: str, quotes: Quotes) -> None:
        self._text, self._quotes = text, quotes
        self._at = 0

    @property
    def ended(self) -> bool:
        """Return whether only blanks are left."""
        self._blanks()
        return self._at == len(self._text)

    def value(self, depth: int) -> Any:
        """Read a value."""
        self._blanks()
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if (opened := self._quotes.opened(self._text, self._at)) is not None:
            return self._string(opened)
        sign = self._text[self._at]
        if sign == "{":
            self._at += 1
            return self.pairs("}", ":", depth + 1)
        if sign in "[(":
            return self._list(_PARTNERS[sign], depth + 1)
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return float(number[0]) if set(".eE") & set(number[0]) else int(number[0])
        return _WORDS[self._word()] if self._peek_word() in _WORDS else self._fail()

    def pairs(self, close: str, assign: str, depth: int = 0) -> dict[str, Any]:
        """Read keys and values up to a closing bracket, or to the end if there is none."""
        found: dict[str, Any] = {}
        while not self._closed(close):
            if found:
                self._take(",")
                if self._closed(close):
                    break
            self._blanks()
            opened = self._quotes.opened(self._text, self._at)
            key = self._word() if opened is None else self._string(opened)
            self._blanks()
            self._take(assign)
            found[key] = self.value(depth)
        return found

    def _list(self, close: str, depth: int) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        while not self._closed(close):
            if found:
                self._take(",")
                if self._closed(close):
                    break
            found.append(self.value(depth))
        return found

    def _closed(self, close: str) -> bool:
        self._blanks()
        if not close:
            return self._at == len(self._text)
        closed = self._text[self._at] == close
        self._at += closed
        return closed

    def _take(self, sign: str) -> None:
        if not self._text.startswith(sign, self._at):
            self._fail()
        self._at += len(sign)

    def _string(self, opened: tuple[str, str, bool]) -> str:
        start = self._at + len(opened[0])
        end = self._quotes.end(self._text, start, opened)
        if end < 0:
            self._fail()
        self._at = end + len(opened[1])
        inner = self._text[start:end]
        return unescaped(inner) if opened[2] else inner

    def _peek_word(self) -> str:
        found = _WORD.match(self._text, self._at)
        return found[0] if found is not None else ""

    def _word(self) -> str:
        word = self._peek_word()
        if not word:
            self._fail()
        self._at += len(word)
        return word

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _fail(self) -> Any:
        raise ValueError("no literal")


def unescaped(text: str) -> str:
    """Return a string with JSON's and Python's escape sequences resolved; unknown ones stay."""
    parts, at = [], 0
    while (slash := text.find("\\", at)) >= 0:
        parts.append(text[at:slash])
        sign = text[slash + 1 : slash + 2]
        digits = text[slash + 2 : slash + 2 + _CODES.get(sign, 0)]
        at = slash + 2
        if sign in _CODES and len(digits) == _CODES[sign] and _is_code(digits):
            parts.append(chr(int(digits, 16)))
            at += len(digits)
        elif sign in ("\\", "'", '"', "/"):
            parts.append(sign)
        elif sign != "\n":
            parts.append(_ESCAPES.get(sign, "\\" + sign))
    whole = "".join([*parts, text[at:]])
    return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_code(digits: str) -> bool:
    return all(each in "0123456789abcdefABCDEF" for each in digits) and int(digits, 16) <= 0x10FFFF


class LiteralEnd:
    """Finds the bracket that closes a call's arguments; each call continues at the position reached."""

    def __init__(self, quotes: Quotes) -> None:
        self._quotes = quotes
        self._open: list[str] = []
        self._string: tuple[str, str, bool] | None = None
        self._begun = self._searched_to = 0
        self.broken = False

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, bool]:
        """Return the position reached in the same text, which may have grown, and whether the bracket is there."""
        longest = max(map(len, self._quotes.own))
        while at < len(text) and not self.broken:
            if self._string is not None:
                found = self._quotes.end(text, self._begun, self._string, self._searched_to)
                if found < 0 or (not ended and self._is_open(text, found)):
                    self._searched_to = len(text) - len(self._string[1]) - 1 if found < 0 else found
                    return at, False
                at, self._string = found + len(self._string[1]), None
            elif len(text) - at < longest and not ended and self._quotes.own[0].startswith(text[at:]):
                return at, False
            elif (opened := self._quotes.opened(text, at)) is not None:
                self._string, self._begun, self._searched_to = opened, at + len(opened[0]), 0
                at = self._begun
            elif text[at] in _PARTNERS:
                self._open.append(_PARTNERS[text[at]])
                self.broken = len(self._open) > MAX_DEPTH
                at += 1
            elif text[at] in ")]}":
                if not self._open:
                    return at, True
                self.broken = self._open.pop() != text[at]
                at += 1
            else:
                at += 1
        return at, False

    def _is_open(self, text: str, found: int) -> bool:
        """Return whether more text could show that an unescaped closing mark closes nothing."""
        assert self._string is not None
        following = text[found + 1 : found + 1 + MAX_BLANKS]
        is_ambiguous = not self._string[2] and len(self._string[1]) == 1
        return is_ambiguous and len(following) < MAX_BLANKS and not following.strip()
