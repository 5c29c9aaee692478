"""Grammar of arguments' values in a model's own syntax: text between marks, literals, and nested parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.router.text.parsers.derived.argument_readers import quotes_of
from kvferry.router.text.parsers.derived.literals import Quotes
from kvferry.router.text.parsers.derived.syntax import KEY, Arguments
from kvferry.router.text.parsers.derived.typed import kinds, properties, resolved
from kvferry.router.text.parsers.syntax import Rules, Tool, closed, either, has_token, ordered
from kvferry.structured_output import lark

_DEFINITIONS = ("$defs", "definitions")
_NUMBER_KINDS = ("integer", "number", "boolean", "null")
_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_COMMA, _COLON = '(", " | ",")', '(": " | ":")'
"""Separators, spelled as JSON's are, so that the lexer cannot take one for the other."""
_ANY_CHARACTER = r"/(.|\n)"
_MAX_DEPTH = 12
"""Deepest nesting that a grammar spells out; below it, values are free."""

Schema = Mapping[str, Any]


class ValueGrammar:
    """Writer of the expressions for one tool's arguments.

    `is_literal`: they are literals within brackets; otherwise text between marks."""

    def __init__(self, rules: Rules, tool: Tool, form: Arguments, *, is_literal: bool) -> None:
        self._rules, self._tool, self._form, self._is_literal = rules, tool, form, is_literal
        self._root = closed(tool.parameters)
        self._quotes = quotes_of(form) if is_literal else Quotes(("'", "'"))

    def arguments(self) -> str:
        """Return the expression for all arguments."""
        return self._pairs(self._root, self._pair, self._free_pairs, self._separator, 0)

    def _pairs(
        self, schema: Any, pair: Callable[[str, Any, int], str], free: Callable[[int], str], separator: str, depth: int
    ) -> str:
        """Return the expression for an object's properties, in the template's order."""
        known = properties(schema)
        if not known:
            return free(depth) if _is_open(schema) else ""
        required = frozenset(schema.get("required") or ())
        keys = sorted(known) if self._form.is_sorted else list(known)
        return ordered(self._rules, [(pair(key, known[key], depth), key in required) for key in keys], separator)

    @property
    def _separator(self) -> str:
        return self._rules.spell(self._form.separator) if self._form.separator else ""

    def _pair(self, key: str, schema: Any, depth: int) -> str:
        """Return the expression for a parameter."""
        form, rules = self._form, self._rules
        before, after = rules.spell(form.before_key + key), form.after_other.replace(KEY, key)
        if self._is_literal:
            return rules.rule(f"{before} {rules.spell(form.before_other)} {self._literal(schema, depth)}")
        allowed = kinds(schema, self._root)
        as_text = f"{rules.spell(form.before_text)} {self._text(schema, form.after_text.replace(KEY, key))}"
        if allowed == {"string"}:
            return rules.rule(f"{before} {as_text}")
        is_free = not allowed or "string" in allowed or (form.as_tree and self._is_free(schema))
        if form.as_tree and is_free and allowed and "string" not in allowed and has_token(rules.spell(form.before_key)):
            return rules.rule(f"{before} {rules.spell(form.before_other)} {self._any_tree()} {rules.spell(after)}")
        if form.before_text == form.before_other and is_free:
            return rules.rule(f"{before} {as_text}")
        other = f"{rules.spell(form.before_other)} {self._other(schema, depth)} {rules.spell(after)}"
        if not allowed or "string" in allowed:
            other = either([as_text, other])
        return rules.rule(f"{before} {other}")

    def _is_free(self, schema: Any) -> bool:
        """Return whether a list or object may hold anything."""
        own = resolved(schema, self._root) if "$ref" in schema else schema
        if kinds(own, self._root) == {"array"}:
            return not kinds(own.get("items"), self._root) or self._is_free(own["items"])
        return kinds(own, self._root) == {"object"} and not properties(own) and _is_open(own)

    def _free_pairs(self, depth: int) -> str:
        """Return the expression for parameters of any name."""
        form, rules = self._form, self._rules
        key = rules.terminal(_FREE_KEY)
        if self._is_literal:
            value = f"{key} {rules.spell(form.before_other)} {self._any_literal()}"
            return f"({value} ({self._separator} {value})*)?"
        after = rules.up_to(form.after_text) if KEY not in form.after_text else self._keyed_end(key)
        lead = rules.spell(form.before_key) if form.before_key else ""
        return f"({lead} {key} {rules.spell(form.before_text)} {after})*"

    def _keyed_end(self, key: str) -> str:
        before, _, after = self._form.after_text.partition(KEY)
        return f"{self._rules.up_to(before)} {key} {self._rules.spell(after)}"

    def _text(self, schema: Any, after: str) -> str:
        """Return the expression for an unquoted string and what ends it."""
        rules = self._rules
        if isinstance(schema, Mapping) and (options := _options(schema)) is not None:
            return f"{either([lark.text(str(each)) for each in options])} {rules.spell(after)}"
        if isinstance(schema, Mapping) and isinstance(longest := schema.get("maxLength"), int):
            least = schema.get("minLength") if isinstance(schema.get("minLength"), int) else 0
            bounded = rules.terminal(_ANY_CHARACTER + f"{{{least},{longest}}}/")
            return f"{bounded} {rules.spell(after)}"
        return rules.up_to(after)

    def _other(self, schema: Any, depth: int) -> str:
        """Return the expression for a value between marks that is no string."""
        if self._form.as_tree and (nested := self._tree(schema, depth)):
            return nested
        allowed = kinds(schema, self._root)
        options = [self._json(schema)]
        if not self._form.as_json and allowed & {"array", "object"} and not self._form.as_tree:
            options.append(self._literal(schema, depth))
        return either([*options, *self._words(allowed)])

    def _words(self, allowed: frozenset[str]) -> list[str]:
        """Return the model's own words for true, false and null where they are not JSON's."""
        yes, no, null = self._form.words
        words = [yes, no] if not allowed or "boolean" in allowed else []
        words += [null] if not allowed or "null" in allowed else []
        return [lark.text(word) for word in words if word and word not in ("true", "false", "null")]

    def _tree(self, schema: Any, depth: int) -> str:
        """Return the expression for a list or object as nested parameters; empty for other values."""
        form, rules, allowed = self._form, self._rules, kinds(schema, self._root)
        own = resolved(schema, self._root) if isinstance(schema, Mapping) and "$ref" in schema else schema
        if depth > _MAX_DEPTH or not isinstance(own, Mapping):
            return ""
        if allowed == {"object"}:
            return self._pairs(own, self._pair, self._free_pairs, "", depth + 1) or '""'
        if allowed == {"array"}:
            return f"{rules.rule(self._pair(form.as_tree, own.get('items', {}), depth + 1))}*"
        return ""

    def _any_tree(self) -> str:
        """Return the rule for any value as nested parameters."""
        rules, form = self._rules, self._form
        if rules.literal is None:
            rules.literal = name = rules.rule('""')
            place, key = len(rules.lines) - 1, rules.terminal(_FREE_KEY)
            before, _, after = form.after_text.partition(KEY)
            lead = f"{rules.spell(form.before_key)} {key} {rules.spell(form.before_text)}"
            pair = f"{lead} {name} {rules.spell(before)} {key} {rules.spell(after)}"
            rules.lines[place] = f"{name}: {rules.any()} | ({pair})+"
        return rules.literal

    def _json(self, schema: Any) -> str:
        shared = {key: self._root[key] for key in _DEFINITIONS if key in self._root}
        own = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return self._rules.rule(lark.schema(own, lenient=not self._tool.strict))

    def _literal(self, schema: Any, depth: int) -> str:
        """Return the expression for a literal."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return self._any_literal()
        if "$ref" in schema:
            return self._literal(resolved(schema, self._root), depth + 1)
        if (options := _options(schema)) is not None:
            return either([self._written(each) for each in options])
        if inner := schema.get("anyOf") or schema.get("oneOf"):
            return either([self._literal(each, depth + 1) for each in inner])
        allowed = kinds(schema, self._root)
        if not allowed:
            return self._any_literal()
        return either([self._of_kind(kind, schema, depth) for kind in sorted(allowed)])

    def _of_kind(self, kind: str, schema: Schema, depth: int) -> str:
        if kind == "string":
            return self._string()
        if kind == "array":
            return self._list(self._literal(schema.get("items"), depth + 1))
        if kind == "object":
            free = self._key_and_value(self._rules.terminal(_FREE_KEY), self._any_literal())
            any_pairs = f"({free} ({_COMMA} {free})*)?"
            inner = self._pairs(schema, self._member, lambda _: any_pairs, _COMMA, depth + 1)
            return self._rules.rule(f"{lark.text('{')} {inner} {lark.text('}')}")
        numbers = self._json(
            {**{key: each for key, each in schema.items() if key not in ("type", "anyOf")}, "type": kind}
        )
        return either([numbers, *self._words(frozenset((kind,)))])

    def _member(self, key: str, schema: Any, depth: int) -> str:
        return self._rules.rule(self._key_and_value(lark.text(key), self._literal(schema, depth)))

    def _key_and_value(self, key: str, value: str) -> str:
        own, spell = self._quotes.own, self._rules.spell
        keys = [f"{spell(own[0])} {key} {spell(own[1])}", f"{lark.text(chr(34))} {key} {lark.text(chr(34))}"]
        return f"{either(keys) if self._form.quoted_keys else key} {_COLON} {value}"

    def _list(self, item: str) -> str:
        one = self._rules.rule(item)
        return self._rules.rule(f"{lark.text('[')} ({one} ({_COMMA} {one})*)? {lark.text(']')}")

    def _string(self) -> str:
        """Return the expression for a string in the model's quotes, or in JSON's where those are single ones."""
        begin, end = self._quotes.own
        if begin == '"':
            return self._json({"type": "string"})
        if len(begin) > 1:
            return self._rules.rule(f"{self._rules.spell(begin)} {self._rules.up_to(end)}")
        inner = r"([^'\\]|\\.)*" if self._quotes.escaped else r"[^']*"
        return either([self._rules.terminal(f"/'{inner}'/"), self._json({"type": "string"})])

    def _any_literal(self) -> str:
        """Return the rule for any literal."""
        if self._rules.literal is None:
            self._rules.literal = name = self._rules.rule('"null"')
            place = len(self._rules.lines) - 1
            free = self._key_and_value(self._rules.terminal(_FREE_KEY), name)
            options = [
                self._string(),
                self._list(name),
                *self._words(frozenset()),
                self._json({"type": list(_NUMBER_KINDS)}),
            ]
            options.append(f"{lark.text('{')} ({free} ({_COMMA} {free})*)? {lark.text('}')}")
            self._rules.lines[place] = f"{name}: {' | '.join(options)}"
        return self._rules.literal

    def _written(self, value: Any) -> str:
        """Return the expression for one value as the model writes it."""
        if isinstance(value, str):
            begin, end = self._quotes.own
            inner = json.dumps(value, ensure_ascii=False)[1:-1] if self._quotes.escaped else value
            return f"{self._rules.spell(begin)} {self._rules.spell(inner) if inner else ''} {self._rules.spell(end)}"
        if value is None or isinstance(value, bool):
            word = self._form.words[2 if value is None else int(not value)]
            return either([lark.text(each) for each in dict.fromkeys((word, json.dumps(value)))])
        return lark.text(json.dumps(value))


def _options(schema: Schema) -> Sequence[Any] | None:
    """Return the values to which a schema limits; None if it does not."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def _is_open(schema: Any) -> bool:
    """Return whether an object without listed properties may have some."""
    return not isinstance(schema, Mapping) or (
        "properties" not in schema and schema.get("additionalProperties") is not False
    )
