"""Builders of Lark grammar text (llguidance's dialect): literals, special tokens, JSON schemas, regular expressions.

Example: a grammar of kind `lark` for a tool call in a model's own syntax:

    start: call+
    call: {token(call_id)} {text('{"name": "get", "arguments": ')} arguments {text("}")} {token(end_id)}
    arguments: {schema({"type": "object", ...})}

The output may end only where the grammar is complete. Grammars never name end-of-sequence tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

COMMA, COLON = ", ", ": "
"""Separators of JSON, as Python's json module writes it; no other blanks are allowed.

If blanks were free, a small model would emit them until its budget is spent, or open an object where it meant a string,
since `":{` is a token and `: "` is none."""


def text(literal: str) -> str:
    """Return an expression for exactly this text in ordinary tokens, without special tokens (see `token`)."""
    return json.dumps(literal)


def token(token_id: int) -> str:
    """Return an expression for one special token. It may stand in rules (lower-case names), not in terminals."""
    return f"<[{token_id}]>"


def spelled(tokens: Mapping[str, int], literal: str, *, ends: Collection[int] = ()) -> str:
    """Return an expression for this text, in which each of these texts stands for its token, the longest first.

    ends: tokens that end an output, which are left out."""
    known = sorted((each for each in tokens if each and each in literal), key=len, reverse=True)
    if not known:
        return text(literal)
    parts = re.split(f"({'|'.join(map(re.escape, known))})", literal)
    kept = [part for part in parts if part and tokens.get(part) not in ends]
    return " ".join(token(tokens[part]) if part in tokens else text(part) for part in kept) or text("")


def schema(json_schema: Any, *, lenient: bool = False, whitespace: str | None = None) -> str:
    """Return an expression for JSON that a schema (an object or a bool) describes; for rules, not terminals.

    lenient: ignore keywords that cannot be enforced instead of refusing them. whitespace: a regular expression matched
    at most once wherever JSON allows blanks; "" allows none; None allows one blank after each comma and colon."""
    own = json_schema if isinstance(json_schema, dict) else {} if json_schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    if whitespace is None:
        options |= {"item_separator": COMMA, "key_separator": COLON}
    guidance = {**options, "lenient": lenient, "coerce_one_of": lenient}
    return "%json " + json.dumps({**own, "x-guidance": guidance})


def terminal(expression: str) -> str:
    """Return a regular expression (Rust's `regex` syntax) as a terminal.

    Raises nothing: errors in it are found when the grammar is compiled."""
    parts, escaped = [], False
    for char in expression:
        parts.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(parts) + "/"


class RuleLines:
    """Collector of a grammar's rules and terminals, with generated names."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name
