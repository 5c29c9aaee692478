"""Builders of Lark grammar text: literals, special tokens, JSON schemas.

A grammar of kind `lark` for a tool call in a model's own syntax, say:

    start: call+
    call: {token(call_id)} {text('{"name": "get", "arguments": ')} arguments {text("}")} {token(end_id)}
    arguments: {schema({"type": "object", ...})}

The output may end wherever the grammar is complete, and only there: end-of-sequence tokens are never named in it.
"""

from __future__ import annotations

import json
from typing import Any

COMMA, COLON = ", ", ": "
"""Between the tokens of JSON, as Python's json module writes it; no other blanks. Were they free, a small model would
emit them until its budget is spent, or open an object where it meant a text, since `":{` is a token and `: "` none."""


def text(literal: str) -> str:
    """Exactly this text, in ordinary tokens: special tokens that look alike are not meant (see `token`)."""
    return json.dumps(literal)


def token(token_id: int) -> str:
    """One special token of the vocabulary. Stands in rules (lower-case names), never in terminals."""
    return f"<[{token_id}]>"


def schema(json_schema: Any, *, lenient: bool = False, whitespace: str | None = None) -> str:
    """JSON that a schema (a JSON value: an object, or a bool) describes.

    lenient: keywords that cannot be enforced are ignored instead of refused. whitespace: a regular expression matched
    at most once wherever JSON allows blanks; empty allows none there; None: blanks stand behind commas and colons, one
    each. Stands in rules, never in terminals."""
    own = json_schema if isinstance(json_schema, dict) else {} if json_schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    if whitespace is None:
        options |= {"item_separator": COMMA, "key_separator": COLON}
    guidance = {**options, "lenient": lenient, "coerce_one_of": lenient}
    return "%json " + json.dumps({**own, "x-guidance": guidance})


def terminal(expression: str) -> str:
    """A regular expression (Rust's `regex` syntax) as a terminal.

    Raises nothing: what it cannot read is found when the grammar is compiled."""
    parts, escaped = [], False
    for char in expression:
        parts.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(parts) + "/"
