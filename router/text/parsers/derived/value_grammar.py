"""ValueGrammar: Lark expressions for a tool's arguments in a derived syntax, as marked text, literals or nested."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvferry.router.text.parsers.derived.literal_grammar import FREE_KEY, MAX_DEPTH, LiteralGrammar, is_open, options_of
from kvferry.router.text.parsers.derived.syntax import ID, KEY, Arguments
from kvferry.router.text.parsers.derived.typed import kinds, properties, resolved
from kvferry.router.text.parsers.rules import Rules, either, has_token
from kvferry.router.text.parsers.syntax import Tool
from kvferry.structured_output import lark

_KINDS = ("array", "boolean", "null", "number", "object")
_ANY_CHARACTER = r"/(.|\n)"


class ValueGrammar:
    """Writer of the expressions for one tool's arguments.

    `is_literal`: they are literals within brackets; otherwise text between marks."""

    def __init__(self, rules: Rules, tool: Tool, form: Arguments, *, is_literal: bool) -> None:
        self._rules, self._form, self._is_literal = rules, form, is_literal
        self._values = LiteralGrammar(rules, tool, form, is_literal=is_literal)
        self._root = self._values.root

    def arguments(self) -> str:
        """Return the expression for all arguments."""
        return self._values.pairs(self._root, self._pair, self._free_pairs, self._separator, 0)

    @property
    def _separator(self) -> str:
        return self._rules.spell(self._form.separator) if self._form.separator else ""

    def _pair(self, key: str, schema: Any, depth: int) -> str:
        """Return the expression for a parameter."""
        form, rules = self._form, self._rules
        before, after = rules.spell(form.before_key + key), form.after_other.replace(KEY, key)
        if self._is_literal:
            return rules.rule(f"{before} {rules.spell(form.before_other)} {self._values.value(schema, depth)}")
        allowed = kinds(schema, self._root)
        as_text = f"{rules.spell(form.before_text)} {self._text(schema, form.after_text.replace(KEY, key))}"
        if allowed == {"string"}:
            return rules.rule(f"{before} {as_text}")
        is_free = not allowed or "string" in allowed or (form.as_tree and self._is_free(schema))
        if form.as_tree and is_free and allowed and "string" not in allowed and has_token(rules.spell(form.before_key)):
            return rules.rule(f"{before} {self._before_other(allowed)} {self._any_tree()} {rules.spell(after)}")
        if form.before_text == form.before_other and is_free:
            return rules.rule(f"{before} {as_text}")
        other = f"{self._before_other(allowed)} {self._other(schema, depth)} {rules.spell(after)}"
        if not allowed or "string" in allowed:
            other = either([as_text, other])
        return rules.rule(f"{before} {other}")

    def _before_other(self, allowed: Collection[str]) -> str:
        """Return the expression for the text between a key and a value of these types that is no string."""
        names = {"number" if kind == "integer" else kind for kind in allowed or _KINDS} - {"string"}
        texts = dict.fromkeys(self._form.before_other.replace(ID, name) for name in sorted(names))
        return either(list(map(self._rules.spell, texts)))

    def _is_free(self, schema: Any) -> bool:
        """Return whether a list or object may hold anything."""
        own = resolved(schema, self._root) if "$ref" in schema else schema
        if kinds(own, self._root) == {"array"}:
            return not kinds(own.get("items"), self._root) or self._is_free(own["items"])
        return kinds(own, self._root) == {"object"} and not properties(own) and is_open(own)

    def _free_pairs(self, depth: int) -> str:
        """Return the expression for parameters of any name."""
        form, rules = self._form, self._rules
        key = rules.terminal(FREE_KEY)
        if self._is_literal:
            value = f"{key} {rules.spell(form.before_other)} {self._values.any_value()}"
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
        if isinstance(schema, Mapping) and (options := options_of(schema)) is not None:
            return f"{either([lark.text(str(each)) for each in options])} {rules.spell(after)}"
        if isinstance(schema, Mapping) and isinstance(longest := schema.get("maxLength"), int):
            least = schema.get("minLength") if isinstance(schema.get("minLength"), int) else 0
            bounded = rules.terminal(_ANY_CHARACTER + f"{{{least},{longest}}}/")
            return f"{bounded} {rules.spell(after)}"
        return rules.up_to(after)

    def _other(self, schema: Any, depth: int) -> str:
        """Return the expression for a value between marks that is not a string."""
        if self._form.as_tree and (nested := self._tree(schema, depth)):
            return nested
        allowed = kinds(schema, self._root)
        options = [self._values.json(schema)]
        if not self._form.as_json and allowed & {"array", "object"} and not self._form.as_tree:
            options.append(self._values.value(schema, depth))
        return either([*options, *self._values.words(allowed)])

    def _tree(self, schema: Any, depth: int) -> str:
        """Return the expression for a list or object as nested parameters; empty for other values."""
        form, rules, allowed = self._form, self._rules, kinds(schema, self._root)
        own = resolved(schema, self._root) if isinstance(schema, Mapping) and "$ref" in schema else schema
        if depth > MAX_DEPTH or not isinstance(own, Mapping):
            return ""
        if allowed == {"object"}:
            return self._values.pairs(own, self._pair, self._free_pairs, "", depth + 1) or '""'
        if allowed == {"array"}:
            return f"{rules.rule(self._pair(form.as_tree, own.get('items', {}), depth + 1))}*"
        return ""

    def _any_tree(self) -> str:
        """Return the rule for any value as nested parameters."""
        rules, form = self._rules, self._form
        if rules.literal is None:
            rules.literal = name = rules.rule('""')
            place, key = len(rules.lines) - 1, rules.terminal(FREE_KEY)
            before, _, after = form.after_text.partition(KEY)
            lead = f"{rules.spell(form.before_key)} {key} {rules.spell(form.before_text)}"
            pair = f"{lead} {name} {rules.spell(before)} {key} {rules.spell(after)}"
            rules.lines[place] = f"{name}: {rules.any()} | ({pair})+"
        return rules.literal
