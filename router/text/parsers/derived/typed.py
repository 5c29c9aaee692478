"""Converts unquoted argument texts into values of the types that the tool's JSON schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.router.text.parsers.derived.literals import Quotes, literal

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_MAX_DEPTH = 8
"""Maximum depth of references and alternatives that are followed in a schema."""


def properties(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters."""
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def kinds(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """Return the types of JSON that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(named := schema.get("type"), str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return frozenset(kind for value in values for kind in _kinds_of(value))
    if isinstance(schema.get("$ref"), str):
        return kinds(resolved(schema, root), root, depth + 1)
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    known = [kinds(each, root, depth + 1) for each in inner]
    return frozenset[str]().union(*known) if all(known) else frozenset()


def resolved(schema: Mapping[str, Any], root: Any) -> Any:
    """Return the schema to which a reference within the root schema points; None if there is none."""
    at = root
    for part in str(schema.get("$ref", "")).removeprefix("#/").split("/"):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def value_of(text: str, schema: Any, root: Any, quotes: Quotes) -> Any:
    """Return the value of an unquoted text, of a type that the schema allows if possible."""
    allowed = kinds(schema, root)
    if allowed == {"string"}:
        return text
    found, value = read(text, quotes)
    if not found:
        return text
    if not allowed:
        return value if not isinstance(value, str) else text
    if not allowed.intersection(_kinds_of(value)):
        return text if "string" in allowed or isinstance(value, str) else value
    return text if isinstance(value, str) else value


def read(text: str, quotes: Quotes) -> tuple[bool, Any]:
    """Return whether the text is JSON or a literal, and its value."""
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return literal(text, quotes)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _kinds_of(value: Any) -> Iterator[str]:
    for kind, types in _TYPES.items():
        if isinstance(value, types) and (not isinstance(value, bool) or kind == "boolean"):
            yield kind
