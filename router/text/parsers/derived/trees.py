"""Reads lists and objects that are written as nested parameters, each key as a mark around its value (MiniMax M3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvferry.router.text.parsers.derived.literals import Quotes
from kvferry.router.text.parsers.derived.syntax import KEY, Arguments
from kvferry.router.text.parsers.derived.typed import kinds, properties, value_of

_KEY = r"([^\s<>\[\]{}\"'=/]{1,256})"
_MAX_DEPTH = 50


def tree(text: str, form: Arguments, schema: Any, root: Any, depth: int = 0) -> Any:
    """Return the value of a parameter's text: an object, a list, or the value of an unquoted text."""
    if depth > _MAX_DEPTH or not text.startswith(form.before_key) or "string" in kinds(schema, root):
        if not text and (empty := kinds(schema, root) & {"object", "array"}):
            return {} if "object" in empty else []
        return value_of(text, schema, root, Quotes())
    parts = _parts(text, form)
    if parts is None:
        return text
    if all(key == form.as_tree for key, _ in parts) and "object" not in kinds(schema, root):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [tree(inner, form, items, root, depth + 1) for _, inner in parts]
    own = properties(schema)
    return {key: tree(inner, form, own.get(key), root, depth + 1) for key, inner in parts}


def _parts(text: str, form: Arguments) -> list[tuple[str, str]] | None:
    """Return keys and texts of nested parameters; None if the text is not nested parameters."""
    before, middle = re.escape(form.before_key), re.escape(form.before_text)
    begin, found, at = re.compile(f"{before}{_KEY}{middle}"), list[tuple[str, str]](), 0
    while at < len(text):
        head = begin.match(text, at)
        if head is None:
            return None
        key, start, depth, place, end = head[1], head.end(), 1, head.end(), 0
        after = re.escape(form.after_text.replace(KEY, key))
        marks = re.compile(f"({before}{re.escape(key)}{middle})|{after}")
        while depth:
            mark = marks.search(text, place)
            if mark is None:
                return None
            depth, end, place = depth + (1 if mark[1] else -1), mark.start(), mark.end()
        found.append((key, text[start:end]))
        at = place
    return found
