"""Incremental readers of one call's arguments (JSON envelope, JSON object, literals), and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from kvferry.router.text.parsers.derived.literals import LiteralEnd, Quotes, arguments
from kvferry.router.text.parsers.derived.matching import match
from kvferry.router.text.parsers.derived.syntax import Arguments, ToolSyntax
from kvferry.router.text.parsers.json_call import CallObject, ValueEnd, is_object


class ArgumentReader(Protocol):
    """Incremental reader of arguments. The caller keeps text that was not read and passes it again.

    done          the arguments are complete
    broken        the text holds no arguments
    valid         complete arguments are a JSON object
    name          of the tool, once known
    raw           all text that was read
    """

    raw: list[str]

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def valid(self) -> bool: ...

    def feed(self, text: str, *, ended: bool) -> int:
        """Read more and return the position reached; pass the rest again. `ended`: no more text comes."""

    def take(self) -> str:
        """Return the JSON of the arguments read since the last call."""


class EnvelopeReader:
    """Reader of a JSON object around name and arguments. Implements ArgumentReader."""

    def __init__(self, names: Mapping[str, Any], name_key: str, arguments_key: str) -> None:
        self._object = CallObject(names, name_key, arguments_key)
        self.raw = self._object.raw
        self.take = self._object.take

    @property
    def name(self) -> str:
        return self._object.name

    @property
    def done(self) -> bool:
        return self._object.done

    @property
    def broken(self) -> bool:
        return self._object.broken

    @property
    def valid(self) -> bool:
        return self._object.valid

    def feed(self, text: str, *, ended: bool) -> int:
        return self._object.feed(text)


class _Read:
    """Base of readers that know the tool's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.raw: list[str] = []
        self.done = self.broken = False
        self._fresh: list[str] = []

    def take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh


class JsonReader(_Read):
    """Reader of arguments that are a JSON object. Implements ArgumentReader."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._end = ValueEnd()
        self._begun = False

    @property
    def valid(self) -> bool:
        return is_object("".join(self.raw))

    def feed(self, text: str, *, ended: bool) -> int:
        at = 0
        if not self._begun:
            at = len(text) - len(text.lstrip())
            self._begun, self.broken = at < len(text), at < len(text) and text[at] != "{"
            if not self._begun or self.broken:
                return 0
        end = self._end.feed(text, at)
        self.raw.append(text[:end])
        self._fresh.append(text[at:end])
        self.done = self._end.done
        return end


class LiteralReader(_Read):
    """Reader of arguments that are literals within brackets, emitted once complete. Implements ArgumentReader."""

    def __init__(self, form: Arguments, name: str) -> None:
        super().__init__(name)
        self._form, self._quotes = form, quotes_of(form)
        self._end = LiteralEnd(self._quotes)
        self._opened = False
        self._at = 0
        self.valid = True

    def feed(self, text: str, *, ended: bool) -> int:
        if not self._opened:
            found = match(self._form.opening, text)
            if not found.found:
                self.broken = ended or not found.waits
                return 0
            self._opened, self._at = True, found.end
            self._start = found.end
        self._at, closed = self._end.find(text, self._at, ended=ended)
        self.broken = self._end.broken
        if not closed or self.broken:
            return 0
        try:
            value = arguments(text[self._start : self._at], self._form.before_other, self._quotes)
            self._fresh.append("" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False))
        except ValueError:
            value = None
        self.broken, self.done = value is None, value is not None
        if self.broken:
            return 0
        self.raw.append(text[: self._at])
        return self._at


def quotes_of(form: Arguments) -> Quotes:
    """Return the quotes of a form's strings."""
    own = form.quotes
    return Quotes(own, form.escaped) if own[0].strip() and own[1].strip() else Quotes()


def reader_of(syntax: ToolSyntax, names: Mapping[str, Any], name: str) -> ArgumentReader:
    """Return a new reader of a call's arguments; `name` is the tool's, empty if an envelope holds it."""
    from kvferry.router.text.parsers.derived.tagged_reader import TaggedReader

    if syntax.envelope is not None:
        return EnvelopeReader(names, syntax.envelope.name_key, syntax.envelope.arguments_key)
    if syntax.arguments is None:
        return JsonReader(name)
    if syntax.is_literal:
        return LiteralReader(syntax.arguments, name)
    return TaggedReader(syntax, syntax.arguments, name, names.get(name))
