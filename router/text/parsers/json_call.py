"""Incremental parser of a JSON call (object with name and arguments), and of the end of a JSON value."""

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
    """Finds the end of a JSON value without validating its content; `done` once found."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = self._escaped = self._begun = False

    def feed(self, text: str, at: int) -> int:
        """Read from `at` on and return the position reached: the value's end or the end of the text."""
        while at < len(text) and not self.done:
            if self._string:
                at = self._in_string(text, at)
            elif self._depth:
                at = self._in_brackets(text, at)
            else:
                at = self._read_scalar(text, at)
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

    def _read_scalar(self, text: str, at: int) -> int:
        """Read the first character, or more of a number or word, up to a character that ends it."""
        if not self._begun and text[at] in '"{[':
            self._begun = True
            self._string, self._depth = text[at] == '"', int(text[at] != '"')
            return at + 1
        self._begun = True
        at = _run(_ATOM, text, at)
        self.done = at < len(text)
        return at


class CallObject:
    """Incremental parser of `{"name": ..., "arguments": {...}}`; accepts `parameters` and further fields.

    name_key, arguments_key  further keys of a model's own
    done, broken  complete, or invalid as a call of one of `names`
    name          set once the arguments have begun
    raw           all text that was read
    """

    def __init__(self, names: Collection[str], name_key: str = "name", arguments_key: str = "arguments") -> None:
        self._names = names
        self._name_keys, self._arguments_keys = {*_NAMES, name_key}, {*_ARGUMENTS, arguments_key}
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
        """Return whether the object is complete."""
        return self._state == "done"

    @property
    def broken(self) -> bool:
        """Return whether the object is invalid as a call."""
        return self._state == "broken"

    @property
    def valid(self) -> bool:
        """Return whether the arguments of the complete call are a JSON object."""
        return is_object(self._arguments or "{}")

    def take(self) -> str:
        """Return the arguments read since the last call; empty until `name` is known."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` on and return the position reached: the end of the object or of the text, or an error."""
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
        """Take a punctuation character between values; return the number of characters taken."""
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
        """Read some of a key or value; return the position reached."""
        if self._state == "value" and not self._value:
            at = _run(_BLANKS, text, at)
            if at < len(text) and self._key in self._arguments_keys and self._arguments is None and text[at] == "{":
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
        """Return the state after a complete key or value."""
        if self._state == "key":
            key = _json(self._value)
            self._key = key if isinstance(key, str) else ""
            return "colon"
        if not self._value:
            return "broken"
        if self._key in self._name_keys and not self._named:
            name = _json(self._value)
            if not isinstance(name, str) or name not in self._names:
                return "broken"
            self._named = name
        elif self._key in self._arguments_keys and self._arguments is None:
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
    """Return the arguments as the text of an object; some models write them as a string, or null for none."""
    if value.startswith("{"):
        return value
    inner = _json(value)
    if inner is None and value == "null":
        return "{}"
    return inner if isinstance(inner, str) and is_object(inner) else None


def is_object(text: str) -> bool:
    """Return whether the text is a JSON object."""
    return isinstance(_json(text), dict)


def _json(text: str) -> object:
    """Return the decoded value; None also if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the pattern's match at `at`, which may be empty."""
    found = pattern.match(text, at)
    return at if found is None else found.end()
