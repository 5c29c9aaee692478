"""LiteralGrammar: Lark expressions for argument values written as Python, JSON or model-specific literals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any

from kvferry.router.text.parsers.derived.argument_readers import quotes_of
from kvferry.router.text.parsers.derived.literals import Quotes
from kvferry.router.text.parsers.derived.syntax import Arguments
from kvferry.router.text.parsers.derived.typed import kinds, properties, resolved
from kvferry.router.text.parsers.rules import Rules, either
from kvferry.router.text.parsers.syntax import Tool, closed, ordered
from kvferry.structured_output import lark

MAX_DEPTH = 12
"""Deepest nesting that a grammar spells out; below it, values are free."""
FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""Keys of arguments that a schema does not list."""
_DEFINITIONS = ("$defs", "definitions")
_NUMBER_KINDS = ("integer", "number", "boolean", "null")
_COMMA, _COLON = '(", " | ",")', '(": " | ":")'
"""Separators, spelled as JSON's are, so that the lexer cannot take one for the other."""
_SINGLE_QUOTED = r"/'([^'\\]|\\.)*'/"

Schema = Mapping[str, Any]


class LiteralGrammar:
    """Writer of the expressions for one tool's values as literals.

    root       JSON schema of the tool's parameters
    is_literal the arguments are literals within brackets; otherwise only lists and objects may be literals
    """

    def __init__(self, rules: Rules, tool: Tool, form: Arguments, *, is_literal: bool) -> None:
        self.root = closed(tool.parameters)
        self._rules, self._form, self._is_strict = rules, form, tool.strict
        self._quotes = quotes_of(form) if is_literal else Quotes(("'", "'"))

    def pairs(
        self, schema: Any, pair: Callable[[str, Any, int], str], free: Callable[[int], str], separator: str, depth: int
    ) -> str:
        """Return the expression for an object's properties, in the template's order."""
        known = properties(schema)
        if not known:
            return free(depth) if is_open(schema) else ""
        required = frozenset(schema.get("required") or ())
        keys = sorted(known) if self._form.is_sorted else list(known)
        return ordered(self._rules, [(pair(key, known[key], depth), key in required) for key in keys], separator)

    def words(self, allowed: frozenset[str]) -> list[str]:
        """Return the model's own words for true, false and null where they are not JSON's."""
        yes, no, null = self._form.words
        words = [yes, no] if not allowed or "boolean" in allowed else []
        words += [null] if not allowed or "null" in allowed else []
        return [lark.text(word) for word in words if word and word not in ("true", "false", "null")]

    def json(self, schema: Any) -> str:
        """Return the expression for a value as JSON."""
        shared = {key: self.root[key] for key in _DEFINITIONS if key in self.root}
        own = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return self._rules.rule(lark.schema(own, lenient=not self._is_strict))

    def value(self, schema: Any, depth: int) -> str:
        """Return the expression for a literal."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return self.any_value()
        if "$ref" in schema:
            return self.value(resolved(schema, self.root), depth + 1)
        if (options := options_of(schema)) is not None:
            return either([self._written(each) for each in options])
        if inner := schema.get("anyOf") or schema.get("oneOf"):
            return either([self.value(each, depth + 1) for each in inner])
        allowed = kinds(schema, self.root)
        if not allowed:
            return self.any_value()
        return either([self._of_kind(kind, schema, depth) for kind in sorted(allowed)])

    def _of_kind(self, kind: str, schema: Schema, depth: int) -> str:
        if kind == "string":
            return self._string()
        if kind in ("array", "object") and self._form.as_json:
            return self.json({**schema, "type": kind})
        if kind == "array":
            return self._list(self.value(schema.get("items"), depth + 1))
        if kind == "object":
            free = self._key_and_value(self._rules.terminal(FREE_KEY), self.any_value())
            any_pairs = f"({free} ({_COMMA} {free})*)?"
            inner = self.pairs(schema, self._member, lambda _: any_pairs, _COMMA, depth + 1)
            return self._rules.rule(f"{lark.text('{')} {inner} {lark.text('}')}")
        numbers = self.json(
            {**{key: each for key, each in schema.items() if key not in ("type", "anyOf")}, "type": kind}
        )
        return either([numbers, *self.words(frozenset((kind,)))])

    def _member(self, key: str, schema: Any, depth: int) -> str:
        return self._rules.rule(self._key_and_value(lark.text(key), self.value(schema, depth)))

    def _key_and_value(self, key: str, value: str) -> str:
        quotes = dict.fromkeys((self._quotes.own, ('"', '"'), ("'", "'")))
        keys = [f"{self._rules.spell(begin)} {key} {self._rules.spell(end)}" for begin, end in quotes]
        return f"{either(keys) if self._form.quoted_keys else key} {_COLON} {value}"

    def _list(self, item: str) -> str:
        one = self._rules.rule(item)
        return self._rules.rule(f"{lark.text('[')} ({one} ({_COMMA} {one})*)? {lark.text(']')}")

    def _string(self) -> str:
        """Return the expression for a string in the model's quotes, or in JSON's too if those are single quotes."""
        begin, end = self._quotes.own
        if begin == '"':
            own, other = self.json({"type": "string"}), self._rules.terminal(_SINGLE_QUOTED)
            return own if self._form.as_json else either([own, other])
        if len(begin) > 1:
            return self._rules.rule(f"{self._rules.spell(begin)} {self._rules.up_to(end)}")
        inner = r"([^'\\]|\\.)*" if self._quotes.escaped else r"[^']*"
        return either([self._rules.terminal(f"/'{inner}'/"), self.json({"type": "string"})])

    def any_value(self) -> str:
        """Return the rule for any literal."""
        if self._form.as_json:
            return either([self._string(), self.json({"type": ["array", "object", *_NUMBER_KINDS]})])
        if self._rules.literal is None:
            self._rules.literal = name = self._rules.rule('"null"')
            place = len(self._rules.lines) - 1
            free = self._key_and_value(self._rules.terminal(FREE_KEY), name)
            options = [
                self._string(),
                self._list(name),
                *self.words(frozenset()),
                self.json({"type": list(_NUMBER_KINDS)}),
            ]
            options.append(f"{lark.text('{')} ({free} ({_COMMA} {free})*)? {lark.text('}')}")
            self._rules.lines[place] = f"{name}: {' | '.join(options)}"
        return self._rules.literal

    def _written(self, value: Any) -> str:
        """Return the expression for one value as the model writes it."""
        if isinstance(value, str):
            begin, end = self._quotes.own
            inner = dumps(value, ensure_ascii=False)[1:-1] if self._quotes.escaped else value
            return f"{self._rules.spell(begin)} {self._rules.spell(inner) if inner else ''} {self._rules.spell(end)}"
        if value is None or isinstance(value, bool):
            word = self._form.words[2 if value is None else int(not value)]
            return either([lark.text(each) for each in dict.fromkeys((word, dumps(value)))])
        return lark.text(dumps(value))


def options_of(schema: Schema) -> Sequence[Any] | None:
    """Return the only values that a schema allows; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def is_open(schema: Any) -> bool:
    """Return whether an object without listed properties may have some."""
    return not isinstance(schema, Mapping) or (
        "properties" not in schema and schema.get("additionalProperties") is not False
    )
