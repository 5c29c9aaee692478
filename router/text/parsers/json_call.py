"""Incremental parser of JSON calls: an object with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_PLAIN = re.compile(r'[^"\\]*')
_QUIET = re.compile(r'[^"{}\[\]]*')
_ATOM = re.compile(r"[^\s,:{}\[\]\"]*")
_BLANKS = re.compile(r"[ \t\r\n]*")
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")


class ValueEnd:
    """Finds where a JSON value ends. What is between its brackets is not checked. `done` once the end is known."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = self._escaped = self._begun = False

    def feed(self, text: str, at: int) -> int:
        """Read from `at` on; returns up to where. Afterwards `done`, or all of it was read."""
        while at < len(text) and not self.done:
            if self._string:
                at = self._in_string(text, at)
            elif self._depth:
                at = self._in_brackets(text, at)
            else:
                at = self._bare(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _run(_PLAIN, text, at)
        if at < len(text):
            self._escaped = text[at] == "\\"
            if text[at] == '"':
                self._string = False
                self.done = self._depth == 0
            at += 1
        return at

    def _in_brackets(self, text: str, at: int) -> int:
        at = _run(_QUIET, text, at)
        if at < len(text):
            self._string = text[at] == '"'
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[at], 0)
            self.done = self._depth == 0
            at += 1
        return at

    def _bare(self, text: str, at: int) -> int:
        """Its first character, or more of a number or word, which ends before what cannot belong to it."""
        if not self._begun and text[at] in '"{[':
            self._begun = True
            self._string, self._depth = text[at] == '"', int(text[at] != '"')
            return at + 1
        self._begun = True
        at = _run(_ATOM, text, at)
        self.done = at < len(text)
        return at


class CallObject:
    """`{"name": ..., "arguments": {...}}`, read piece by piece; also with `parameters`, and with further fields.

    done, broken   how it ended: whole, or by something that cannot belong to a call of one of `names`
    name           once it may be told: the arguments have begun
    raw            all that was read
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = "open"
        self._key = self._value = ""
        self._end = ValueEnd()
        self._named = ""
        self._arguments: str | None = None
        self._fresh: list[str] = []
        self._streams = False
        self.name = ""
        self.raw: list[str] = []

    @property
    def done(self) -> bool:
        return self._state == "done"

    @property
    def broken(self) -> bool:
        return self._state == "broken"

    @property
    def valid(self) -> bool:
        """Return whether the arguments are an object in JSON, now that it is done."""
        return is_object(self._arguments or "{}")

    def take(self) -> str:
        """Arguments that were read since this was last asked; nothing before `name` is known."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` on; returns up to where. Afterwards done, broken, or all of it was read."""
        start = at
        while at < len(text) and not (self.done or self.broken):
            if self._state not in ("key", "value"):
                at = _run(_BLANKS, text, at)
                if at < len(text):
                    at += self._sign(text[at])
            else:
                at = self._part(text, at)
        self.raw.append(text[start:at])
        return at

    def _sign(self, char: str) -> int:
        """Take a sign between values; returns how many characters were taken."""
        if (self._state, char) in (("open", "{"), ("colon", ":")):
            self._state = {"open": "first", "colon": "value"}[self._state]
            self._begin()
            return 1
        if char == '"' and self._state in ("first", "next"):
            self._state = "key"
            self._begin()
            return 0
        if char == "," and self._state == "after":
            self._state = "next"
            return 1
        if char == "}" and self._state in ("first", "after"):
            self._close()
            return int(self.done)
        self._state = "broken"
        return 0

    def _begin(self) -> None:
        self._value, self._end, self._streams = "", ValueEnd(), False

    def _part(self, text: str, at: int) -> int:
        """Some of a key or of a value."""
        if self._state == "value" and not self._value:
            at = _run(_BLANKS, text, at)
            if at < len(text) and self._key in _ARGUMENTS and self._arguments is None and text[at] == "{":
                self._streams = bool(self._named)
                self.name = self._named
        end = self._end.feed(text, at)
        self._value += text[at:end]
        if self._streams:
            self._fresh.append(text[at:end])
        if self._end.done:
            self._state = self._ended_part()
        elif end == at and at < len(text):
            self._state = "broken"
        return end

    def _ended_part(self) -> str:
        """The state after a key or value that is whole."""
        if self._state == "key":
            key = _json(self._value)
            self._key = key if isinstance(key, str) else ""
            return "colon"
        if not self._value:
            return "broken"
        if self._key in _NAMES and not self._named:
            name = _json(self._value)
            if not isinstance(name, str) or name not in self._names:
                return "broken"
            self._named = name
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = _unpacked(self._value)
            if self._arguments is None:
                return "broken"
        return "after"

    def _close(self) -> None:
        self._state = "done" if self._named else "broken"
        if self.done and not self.name:
            self.name = self._named
            self._fresh.append(self._arguments or "{}")


def _unpacked(value: str) -> str | None:
    """Arguments as the text of an object: some models pack that text into a string, or write null for none."""
    if value.startswith("{"):
        return value
    inner = _json(value)
    if inner is None and value == "null":
        return "{}"
    return inner if isinstance(inner, str) and is_object(inner) else None


def is_object(text: str) -> bool:
    """Return whether it is an object in JSON."""
    return isinstance(_json(text), dict)


def _json(text: str) -> object:
    """None also where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of what the pattern allows ends; it allows nothing at all, too."""
    found = pattern.match(text, at)
    return at if found is None else found.end()
