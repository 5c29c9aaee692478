"""ToolSyntax: description of how a model writes tool calls, from which its parser and its grammar are built.

A text of it may hold placeholders: the tool's name, a call's id or number, a parameter's key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvferry.router.text.parsers.derived.differences import first_unit

NAME, ID, INDEX, KEY, SAID = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
"""Placeholders, which no template writes."""
_SHOWN = {NAME: "NAME", ID: "ID", INDEX: "0", KEY: "KEY"}


class Form(StrEnum):
    """How the arguments of a call are written."""

    JSON = "JSON"
    TAGGED = "tagged values"
    LITERAL = "literals"


@dataclass(frozen=True, slots=True)
class Envelope:
    """JSON object around name and arguments: its text `before` the arguments and `after` them, and its keys."""

    before: str
    after: str
    name_key: str
    arguments_key: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """How arguments that are not a JSON object are written.

    opening        before all of them, also if there are none
    before_key     before each key
    before_text    between a key and a string
    before_other   between a key and any other value; may hold ID for the name of its type
    after_text     after a string
    after_other    after any other value
    separator      between a value's end and the next key's beginning
    none           in place of arguments if there are none
    wrapped        marks around strings that need them (CDATA); empty: there are none
    words          how true, false and null are written
    as_json        lists and objects are JSON
    as_tree        lists and objects are nested parameters, and this is the key of items; empty: they are not
    escaped        strings have escape sequences
    quoted_keys    keys of nested objects are quoted
    is_sorted      parameters are in the order of their names
    """

    opening: str
    before_key: str
    before_text: str
    before_other: str
    after_text: str
    after_other: str
    separator: str
    none: str = ""
    wrapped: tuple[str, str] = ("", "")
    words: tuple[str, str, str] = ("true", "false", "null")
    as_json: bool = True
    as_tree: str = ""
    escaped: bool = False
    quoted_keys: bool = True
    is_sorted: bool = False

    @property
    def quotes(self) -> tuple[str, str]:
        """Return the marks that open and close a string literal."""
        size = len(self.after_text) - len(self.after_other)
        return self.before_text[len(self.before_other) :], self.after_text[:size] if size else self.after_text


@dataclass(frozen=True, slots=True)
class Frame:
    """Marks around the text of an answer, which are not shown.

    begun  text with which the prompt has begun the output
    begin  before the text, with `begun`
    end    after the text, before calls
    last   after text and calls
    reply  name of a call that only says that no call is needed
    """

    begun: str = ""
    begin: str = ""
    end: str = ""
    last: str = ""
    reply: str = ""


UNFRAMED = Frame()
"""No marks around text."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """A model's syntax of tool calls.

    opening    before the first call
    head       begins each call, up to its arguments or its envelope
    close      ends each call
    between    before each further call; None: there is one call at most
    closing    after the last call
    envelope   JSON object that holds name and arguments; None: the head names the tool
    arguments  None: they are a JSON object
    id_length  length of the ids that the template accepts; 0: any ids
    frame      marks around text
    """

    opening: str
    head: str
    close: str
    between: str | None
    closing: str
    envelope: Envelope | None = None
    arguments: Arguments | None = None
    id_length: int = 0
    frame: Frame = UNFRAMED

    @property
    def form(self) -> Form:
        """Return how arguments are written."""
        if self.arguments is None:
            return Form.JSON
        return Form.LITERAL if self.is_literal else Form.TAGGED

    @property
    def is_literal(self) -> bool:
        """Return whether arguments are literals within brackets, which is so if no mark follows a number."""
        return self.arguments is not None and not self.arguments.after_other.strip()

    @property
    def marker(self) -> str:
        """Return the text that opens calls; empty if nothing but the call itself does."""
        return first_unit(self.opening + self.head)

    @property
    def is_marked(self) -> bool:
        """Return whether the marker is unlike text, so that calls may follow text."""
        return is_mark(self.marker)

    def literals(self) -> tuple[str, ...]:
        """Return all its texts, which may contain special tokens."""
        found = [self.opening, self.head, self.close, self.between or "", self.closing]
        if self.envelope is not None:
            found += [self.envelope.before, self.envelope.after]
        if (own := self.arguments) is not None:
            found += [own.opening, own.before_key, own.before_text, own.before_other, own.after_text, own.after_other]
            found += [own.separator, *own.wrapped]
        found += [self.frame.begun, self.frame.begin, self.frame.end, self.frame.last]
        return tuple(filter(None, found))

    def pattern(self, calls: int = 1) -> str:
        """Return the text of calls, with names in capitals for what differs, and {…} for a JSON object of arguments."""
        own, inner = self.arguments, "{…}"
        if self.envelope is not None:
            inner = f"{self.envelope.before}{{…}}{self.envelope.after}"
        elif own is not None:
            inner = f"{own.opening}{own.before_key}{KEY}{own.before_text}VALUE{own.after_text}"
        text = self.opening + (self.between or "").join([self.head + inner + self.close] * calls) + self.closing
        for placeholder, shown in _SHOWN.items():
            text = text.replace(placeholder, shown)
        return text

    def describe(self) -> str:
        """Describe the syntax in one line, by example."""
        texts = (self.head, *(() if self.envelope is None else (self.envelope.before, self.envelope.after)))
        ids = "ids in the call" if ID in "".join(texts) else "numbered calls" if INDEX in "".join(texts) else "no ids"
        several = "several calls" if self.between is not None else "one call"
        return f"{in_one_line(self.pattern())} ({self.form}, {several}, {ids})"


def is_mark(text: str) -> bool:
    """Return whether a text is unlike prose: a bracket and a letter, a long word and a bracket, or three brackets."""
    return re.search(r"[<\[].*\w|\w{6}\[|^>>>$", text) is not None


def in_one_line(text: str) -> str:
    """Return a text of a description for people."""
    return text.replace("\n", "⏎")
