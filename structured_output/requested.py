"""Parses the grammars that clients ask for, in the form of vLLM's structured_outputs, into Grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.structured_output.to_lark import MAX_CHOICES

OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
"""Options of structured_outputs that are supported."""
IGNORED = ("disable_fallback", "disable_additional_properties", "backend")
"""Options of structured_outputs that are ignored."""


def structured_outputs(value: Mapping[str, Any], param: str = "structured_outputs") -> Grammar:
    """Return the grammar of vLLM's structured_outputs; raise InvalidRequest naming the field."""
    known = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    given = [name for name in known if value.get(name) not in (None, False)]
    unknown = [name for name in value if name not in (*known, *OPTIONS, *IGNORED) and not name.startswith("_")]
    if unknown:
        raise InvalidRequest(f"{param} has no field {unknown[0]!r}", param=f"{param}.{unknown[0]}")
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidRequest(f"{param} must have exactly one of {', '.join(known)}; got {got}", param=param)
    blanks = "" if value.get("disable_any_whitespace") else value.get("whitespace_pattern")
    return of_kind(given[0], value[given[0]], blanks, f"{param}.{given[0]}")


def of_kind(kind: str, value: Any, whitespace: Any, param: str) -> Grammar:
    """Return the grammar of a kind and its value; raise InvalidRequest naming `param`.

    whitespace: a regular expression for whitespace in JSON; None: the default."""
    if whitespace is not None and not isinstance(whitespace, str):
        raise InvalidRequest("whitespace_pattern must be a regular expression", param="whitespace_pattern")
    match kind:
        case "json" if isinstance(value, dict | bool | str):
            source = value if isinstance(value, str) else json.dumps(value)
            return Grammar("json_schema", source, whitespace=whitespace)
        case "json_object" if value is True:
            return Grammar("json_object", "", whitespace=whitespace)
        case "regex" if isinstance(value, str) and value:
            return Grammar("regex", value)
        case "choice" if isinstance(value, list) and len(value) > MAX_CHOICES:
            raise InvalidRequest(f"{param} has {len(value)} choices; the limit is {MAX_CHOICES}", param=param)
        case "choice" if isinstance(value, list) and value and all(isinstance(text, str) and text for text in value):
            return Grammar("choice", json.dumps(value))
        case "grammar" if isinstance(value, str) and value:
            return Grammar("ebnf" if "::=" in value else "lark", value)
        case "structural_tag" if isinstance(value, dict | str):
            source = value if isinstance(value, str) else json.dumps(value)
            return Grammar("structural_tag", source, whitespace=whitespace)
    wanted = {
        "choice": "a list of texts, none of them empty",
        "json": "a JSON schema or its text",
        "json_object": "true",
    }
    raise InvalidRequest(f"{param} must be {wanted.get(kind, 'a text that is not empty')}", param=param)
