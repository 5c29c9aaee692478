"""TaggedReader: incremental reader of arguments that are written as keys and values between marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.router.text.parsers.call_parser import held_from
from kvferry.router.text.parsers.derived.differences import first_unit, shared_start
from kvferry.router.text.parsers.derived.literals import Quotes
from kvferry.router.text.parsers.derived.matching import WAIT, Match, match
from kvferry.router.text.parsers.derived.syntax import KEY, Arguments, ToolSyntax
from kvferry.router.text.parsers.derived.trees import tree
from kvferry.router.text.parsers.derived.typed import kinds, properties, read, value_of

MAX_KEY = 256
"""Longest key of a parameter, in characters."""


class TaggedReader:
    """Reader of parameters between marks, one after another. Implements ArgumentReader.

    A value ends at its closing mark only if another parameter or the call's end follows. So a value may contain the
    mark itself."""

    def __init__(self, syntax: ToolSyntax, form: Arguments, name: str, parameters: Any) -> None:
        self.name, self.raw = name, list[str]()
        self.done = self.broken = False
        self.valid = True
        self._form, self._parameters = form, parameters
        self._ends = _ends(syntax)
        self._key_end = first_unit(form.before_text[: shared_start(form.before_text, form.before_other)].lstrip())
        self._readers: Mapping[str, Callable[[str, int, bool], int]] = {
            "opening": self._read_opening, "next": self._read_next, "key": self._read_key, "mark": self._read_mark,
            "wrapper": self._read_wrapper, "value": self._read_value,
        }  # fmt: skip
        self._state, self._fresh = "opening", list[str]()
        self._key = ""
        self._wrapped = self._begun = False
        self._count = self._searched_to = 0
        self._is_text: bool | None = None
        """Whether the value is a string, if its marks or the tool's schema say so."""

    def take(self) -> str:
        """Return the JSON read since the last call; see ArgumentReader."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, *, ended: bool) -> int:
        """Read more; see ArgumentReader."""
        at = 0
        while not (self.done or self.broken):
            state = self._state
            end = self._readers[state](text, at, ended)
            if end < 0 or (end == at and state == self._state):
                break
            at = end
        self.raw.append(text[:at])
        return at

    def _read_opening(self, text: str, at: int, ended: bool) -> int:
        return self._step(match(self._form.opening, text, at), "next", text, ended)

    def _read_next(self, text: str, at: int, ended: bool) -> int:
        """Read the beginning of another parameter, or find the end."""
        closed = [match(end, text, at) for end in self._ends]
        if any(each.found for each in closed):
            self._fresh.append("}" if self._count else "{}")
            self.done = True
            return at
        if any(each.waits for each in closed):
            return self._step(WAIT, "", text, ended)
        return self._step(match(self._form.before_key, text, at), "key", text, ended)

    def _read_key(self, text: str, at: int, ended: bool) -> int:
        end = text.find(self._key_end, at, at + MAX_KEY)
        if end < 0:
            waits = len(text) - at < MAX_KEY and "\n" not in text[at:].strip()
            return self._step(Match(waits=waits), "", text, ended)
        self._key, self._state = text[at:end].strip(), "mark"
        self.broken = not self._key or "\n" in self._key
        return at if self.broken else end

    def _read_mark(self, text: str, at: int, ended: bool) -> int:
        """Read the mark between key and value."""
        form = self._form
        found = [(_exact(each, text, at, ended), each) for each in {form.before_text, form.before_other}]
        if any(each.waits for each, _ in found):
            return self._step(WAIT, "", text, ended)
        end, _, mark = max((each.end, mark == form.before_text, mark) for each, mark in found)
        self._is_text = None if form.before_text == form.before_other else mark == form.before_text
        if kinds(properties(self._parameters).get(self._key), self._parameters) == {"string"}:
            self._is_text = True
        self._searched_to, self._begun = 0, False
        return self._step(Match(end), "wrapper" if form.wrapped[0] else "value", text, ended)

    def _read_wrapper(self, text: str, at: int, ended: bool) -> int:
        """Read the mark before a string that needs one."""
        mark = self._form.wrapped[0]
        if mark.startswith(text[at : at + len(mark)]) and len(text) - at < len(mark) and not ended:
            return -1
        self._wrapped, self._state = text.startswith(mark, at), "value"
        return at + len(mark) * self._wrapped

    def _read_value(self, text: str, at: int, ended: bool) -> int:
        close = self._form.after_other if self._is_text is False else self._form.after_text
        close = (self._form.wrapped[1] if self._wrapped else "") + close.replace(KEY, self._key)
        mark = close.lstrip()
        blanks = close[: len(close) - len(mark)]
        sought = first_unit(mark)
        place = text.find(sought, at + self._searched_to)
        while place >= 0:
            follows = self._follows(mark, text, place, ended)
            if follows.found:
                self._add(text[at:place].removesuffix(blanks))
                self._state = "next"
                return follows.end
            if follows.waits:
                break
            place = text.find(sought, place + 1)
        sure = max(at, place - len(blanks) if place >= 0 else held_from(text, (sought, blanks + sought)))
        if ended or self._is_text or self._wrapped:
            self._show(text[at:sure])
            self._searched_to = max(0, place - sure)
            return len(text) if ended else sure
        self._searched_to = max(0, sure - at)
        return -1

    def _follows(self, mark: str, text: str, place: int, ended: bool) -> Match:
        """Match the end of a value, and the beginning of a parameter or end after it; return the value's match."""
        closed = match(mark, text, place)
        if not closed.found:
            return closed
        if ended and not text[closed.end :].strip():
            return closed
        options = [
            match(each, text, closed.end) for each in (*self._ends, self._form.separator + self._form.before_key)
        ]
        waits = any(each.waits for each in options)
        if any(each.found for each in options) or (ended and waits):
            return closed
        return Match(waits=waits)

    def _show(self, text: str) -> None:
        """Show the beginning of a string, or more of it."""
        if not self._begun:
            self._fresh.append(f'{self._lead()}"')
            self._begun = True
        self._fresh.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _lead(self) -> str:
        self._count += 1
        return f"{', ' if self._count > 1 else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _add(self, text: str) -> None:
        """Show the value that was read, or the rest of a string."""
        if self._is_text or self._wrapped:
            self._show(text)
            self._fresh.append('"')
            return
        schema = properties(self._parameters).get(self._key)
        value: Any
        if self._form.as_tree:
            value = tree(text, self._form, schema, self._parameters)
        elif self._is_text is False:
            found, value = read(text, Quotes())
            value = value if found else text
        else:
            value = value_of(text, schema, self._parameters, Quotes())
        try:
            shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            shown = json.dumps(text, ensure_ascii=False)
        self._fresh.append(self._lead() + shown)

    def _step(self, found: Match, state: str, text: str, ended: bool) -> int:
        """Return where a match ended, and enter `state`; if the output was cut off within the mark, all is read."""
        if found.found:
            self._state = state
        elif found.waits:
            return len(text) if ended else -1
        else:
            self.broken = True
        return found.end


def _exact(pattern: str, text: str, at: int, ended: bool) -> Match:
    """Match a mark before a value; those of its trailing blanks that the text has belong to the mark."""
    body = pattern.rstrip()
    found = match(body, text, at)
    if not found.found:
        return found
    for blank in pattern[len(body) :]:
        if found.end == len(text) and not ended:
            return WAIT
        if text[found.end : found.end + 1] != blank:
            break
        found = Match(found.end + 1)
    return found


def _ends(syntax: ToolSyntax) -> list[str]:
    """Return what may follow a call's arguments."""
    if syntax.close.strip():
        return [syntax.close.strip()]
    ends = [syntax.closing.strip(), "" if syntax.between is None else (syntax.between + syntax.head).strip()]
    return list(filter(None, ends))
