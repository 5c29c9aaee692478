"""`lark_of`: translates every kind of grammar (JSON schema, regex, choice, EBNF, …) into Lark text, within limits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvferry.protocol.errors import InvalidRequest, reason
from kvferry.protocol.work import Grammar
from kvferry.structured_output import lark
from kvferry.structured_output.structural import structural_tag

MAX_SOURCE = 256 * 1024
"""Longest source of a grammar, in characters."""
MAX_EBNF = 64 * 1024
"""Longest source in EBNF, which is translated here, in characters."""
MAX_DEPTH = 64
"""Deepest nesting of a JSON value, or of brackets in a regular expression or grammar, in levels."""
MAX_CHOICES = 10_000
"""Maximum number of texts of a `choice` grammar."""
MAX_WHITESPACE = 1024
"""Longest regular expression for blanks between JSON's tokens, in characters."""

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag")


def lark_of(grammar: Grammar) -> str:
    """Return the grammar as Lark text. Raises InvalidRequest naming the limit that its source exceeds."""
    if grammar.kind not in KINDS:
        raise InvalidRequest(f"a grammar must be one of {', '.join(KINDS)}, got {grammar.kind!r}")
    check_length(grammar)
    return _READERS[grammar.kind](grammar)


def check_length(grammar: Grammar) -> None:
    """Raise InvalidRequest naming the limit that the grammar's length exceeds. Cheap: reads no text."""
    bound, length = MAX_EBNF if grammar.kind == "ebnf" else MAX_SOURCE, len(grammar.source)
    if length > bound:
        raise InvalidRequest(f"the grammar has {length} characters; the limit is {bound}")
    if len(grammar.whitespace or "") > MAX_WHITESPACE:
        raise InvalidRequest(f"whitespace_pattern must have at most {MAX_WHITESPACE} characters")


def _json_schema(grammar: Grammar) -> str:
    value = _json(grammar.source)
    if not isinstance(value, dict | bool):
        raise InvalidRequest("a JSON schema must be an object or a boolean")
    return "start: " + _schema(value, grammar)


def _json_object(grammar: Grammar) -> str:
    return "start: " + _schema({"type": "object"}, grammar)


def _schema(value: Any, grammar: Grammar) -> str:
    return lark.schema(value, lenient=grammar.lenient, whitespace=grammar.whitespace)


def _regex(grammar: Grammar) -> str:
    _check_brackets(grammar.source)
    return f"start: WHOLE\nWHOLE: {lark.terminal(grammar.source)}"


def _choice(grammar: Grammar) -> str:
    """Return one terminal: as rules, choices would take quadratic time."""
    texts = _json(grammar.source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("choices must be a list of non-empty strings")
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"there are {len(texts)} choices; the limit is {MAX_CHOICES}")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(lark.text, texts))


def _lark(grammar: Grammar) -> str:
    _check_brackets(grammar.source)
    return grammar.source


def _ebnf(grammar: Grammar) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    _check_brackets(grammar.source)
    try:
        return str(any_to_lark(grammar.source))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"the grammar cannot be read as EBNF: {reason(error)}") from error


def _structural_tag(grammar: Grammar) -> str:
    return structural_tag(_json(grammar.source), lambda value: _schema(value, grammar))


def _json(source: str) -> Any:
    _check_depth(_levels(source, "{[", "}]", quoted=True))
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"not valid JSON: {reason(error)}") from error


def _check_brackets(source: str) -> None:
    _check_depth(_levels(source, "([{", ")]}", quoted=False))


def _check_depth(levels: Iterable[int]) -> None:
    deepest = max(levels, default=0)
    if deepest > MAX_DEPTH:
        raise InvalidRequest(f"the grammar is nested {deepest} levels deep; the limit is {MAX_DEPTH}")


def _levels(source: str, opening: str, closing: str, *, quoted: bool) -> Iterable[int]:
    """Yield the depth after each opening bracket. quoted: ignore brackets within JSON strings."""
    level, inside, escaped = 0, False, False
    for char in source:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif quoted and char == '"':
            inside = not inside
        elif not inside and char in opening:
            level += 1
            yield level
        elif not inside and char in closing:
            level -= 1


_READERS = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}
