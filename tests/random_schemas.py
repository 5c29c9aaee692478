"""Random JSON schemas whose shapes are those of JSON Schema's keywords, one draw after another from a seed. All of them
can be satisfied, by outputs of some dozens of tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

WORDS = ("name", "age", "city", "tags", "score", "kind", "id", "items", "note", "color", "size", "état", "a b", "x/y")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z][a-z]+ [A-Z][a-z]{0,9}$",
    r"^\d{3}-\d{4}$",
    "^(red|green|blue)$",
    "^[^@ ]{1,9}@x[.]org$",
)
FORMATS = ("date-time", "time", "date", "email", "ipv4", "ipv6", "uuid", "hostname", "duration")
UNSUPPORTED: tuple[dict[str, Any], ...] = (
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"type": "string", "format": "no-such-format"},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
    {"$ref": "https://example.com/schema.json"},
)
"""Each has a keyword that no grammar enforces."""


def random_schemas(count: int) -> list[dict[str, Any]]:
    """The first `count` that differ in more than their title."""
    found: dict[str, dict[str, Any]] = {}
    for seed in itertools.count():
        if len(found) == count:
            return list(found.values())
        schema = random_schema(seed)
        found.setdefault(json.dumps({**schema, "title": ""}, sort_keys=True), schema)
    raise AssertionError


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of that number."""
    chance = random.Random(seed)
    if chance.random() < 0.08:
        return _recursive(chance)
    schema = _object(chance, 2) if chance.random() < 0.6 else _any(chance, 2)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"number {seed}", **schema}


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[Callable[[random.Random], dict[str, Any]]] = [_string, _number, _constant, _simple]
    if depth == 0 or chance.random() < 0.4:
        return chance.choice(leaves)(chance)
    return chance.choice([_object, _object, _array, _map, _union, _all_of, _referring])(chance, depth)


def _simple(chance: random.Random) -> dict[str, Any]:
    kinds = ["boolean", "null", "integer"]
    return {"type": chance.choice([*kinds, chance.sample(kinds, 2)])}


def _string(chance: random.Random) -> dict[str, Any]:
    match chance.randrange(5):
        case 0:
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": chance.choice(FORMATS)}
        case 2:
            low = chance.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + chance.randrange(12)}
        case 3:
            return {"type": ["string", "null"], "maxLength": 20, "description": "may be missing"}
        case _:
            return {"type": "string", "maxLength": 30}


def _number(chance: random.Random) -> dict[str, Any]:
    low = chance.randrange(-200, 200)
    match chance.randrange(5):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(1, 300)}
        case 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + chance.randrange(3, 90)}
        case 2:
            return {"type": "number", "minimum": low / 4, "maximum": low / 4 + chance.randrange(1, 50)}
        case 3:
            return {"type": "integer", "multipleOf": chance.choice([2, 5, 12, 100])}
        case _:
            return {"type": chance.choice(["integer", "number"])}


def _constant(chance: random.Random) -> dict[str, Any]:
    values: list[Any] = ["red", "green", 'with "quotes"', "ü", 1, -2.5, True, None, [1, 2], {"a": "b"}, ""]
    if chance.random() < 0.4:
        return {"const": chance.choice(values)}
    return {"enum": chance.sample(values, chance.randrange(1, 6))}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.8],
    }
    extra = chance.random()
    if extra < 0.85:
        schema["additionalProperties"] = False
    elif extra < 0.95:
        schema["additionalProperties"] = _any(chance, 0)
    return schema


def _map(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"type": "object", "patternProperties": {"^k[0-9]$": _any(chance, 0)}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": _any(chance, 0), "maxProperties": chance.randrange(1, 4)}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(3)
    schema = {"type": "array", "items": _any(chance, depth - 1), "minItems": low, "maxItems": low + chance.randrange(3)}
    if chance.random() < 0.3:
        schema |= {"prefixItems": [_any(chance, 0), _any(chance, 0)], "maxItems": 4}
        if chance.random() < 0.5:
            schema |= {"items": False, "minItems": 2, "maxItems": 2}
    return schema


def _union(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randrange(2, 4))]}
    tagged = [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": _any(chance, 0)}, "required": ["kind"],
         "additionalProperties": False}
        for kind in ("one", "two")
    ]  # fmt: skip
    return {"oneOf": tagged}


def _all_of(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(50)
    parts = [{"minimum": low}, {"maximum": low + chance.randrange(2, 50)}]
    return {"type": "integer", "allOf": parts[: chance.randrange(1, 3)]}


def _referring(chance: random.Random, depth: int) -> dict[str, Any]:
    """References stay within the part that they stand in: it may end up anywhere in a larger schema."""
    return {"$id": f"urn:part:{chance.randrange(10**9)}", "$ref": "#/$defs/a", "$defs": {"a": _any(chance, depth - 1)}}


def _recursive(chance: random.Random) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {"value": _any(chance, 0), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
