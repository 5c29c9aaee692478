"""Lark grammar for outputs with tools: a call that begins is always well formed.

Each family has its own call format. The parts around calls are common: reasoning, free text, one call or more. Markers
in the vocabulary stand for their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.text.parsers import hermes, mistral
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.parsers.rules import Rules, Spell, either, is_token
from kvferry.router.text.parsers.thought_grammar import thought
from kvferry.structured_output import lark

LINE = "\n"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUES = frozenset(("enum", "const", "default", "examples"))
"""JSON schema keywords whose values are no schemas."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""JSON schema keywords whose values map names to schemas."""
_OPEN = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; `parameters` is a JSON schema.

    `strict`: keywords that the grammar cannot enforce are rejected."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def schema(self) -> str:
        """Return the Lark text of the arguments' grammar."""
        return lark.schema(closed(self.parameters), lenient=not self.strict)


@dataclass(frozen=True, slots=True)
class Calls:
    """Call syntax of a family: marker, `opening`, one call or more with `between` them, then `closing`.

    marker   opens calls within free text; empty: calls are the whole answer, which begins unlike text
    opening  text after the marker
    calls    for each tool, the text that begins its call, and Lark text for the rest
    between  Lark text
    """

    marker: str
    opening: str
    calls: Sequence[tuple[str, str]]
    between: str
    closing: str


def _hermes(rules: Rules, tools: Sequence[Tool]) -> Calls:
    rest = f"{lark.text('}' + LINE)} {rules.spell(hermes.END)}"
    calls = _objects(rules, tools, LINE, "arguments", rest)
    return Calls(hermes.BEGIN, "", calls, f"{lark.text(LINE)} {rules.spell(hermes.BEGIN)}", "")


def _llama3_json(rules: Rules, tools: Sequence[Tool]) -> Calls:
    return Calls("", "", _objects(rules, tools, "", "parameters", lark.text("}")), lark.text("; "), "")


def _mistral(rules: Rules, tools: Sequence[Tool]) -> Calls:
    args = rules.spell(mistral.ARGS)
    if not is_token(args):
        calls = _objects(rules, tools, "", "arguments", lark.text("}"))
        return Calls(mistral.BEGIN, " [", calls, lark.text(", "), lark.text("]"))
    calls = [(tool.name, f"{args} {rules.rule(tool.schema())}") for tool in tools]
    return Calls(mistral.BEGIN, "", calls, rules.spell(mistral.BEGIN), "")


def _pythonic(rules: Rules, tools: Sequence[Tool]) -> Calls:
    calls = [(f"{tool.name}(", f"{_keywords(rules, tool)} {lark.text(')')}") for tool in tools]
    return Calls("", "[", calls, lark.text(", "), lark.text("]"))


WRITERS: Mapping[str, Callable[[Rules, Sequence[Tool]], Calls]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}


def grammar(
    family: str,
    tools: Sequence[Tool],
    spell: Spell,
    *,
    forced: bool,
    parallel: bool,
    led: bool = False,
    thinking: Thinking | None = None,
    opened: bool = False,
    answer: str | None = None,
    budget: int | None = None,
) -> str:
    """Return the Lark text of the grammar.

    tools     tools that may be called
    forced    there must be a call; otherwise the answer may be text
    led       text must begin with hermes.REPLY (see `tool_prompt`)
    thinking  reasoning that may come first; `opened`: it has begun
    answer    Lark text of a structured answer
    budget    most tokens of reasoning
    """
    rules = Rules(spell)
    calls = WRITERS[family](rules, tools)
    one = rules.rule(either([f"{lark.text(head)} {rest}" for head, rest in calls.calls]))
    end = f"({calls.between} {one})* {calls.closing}" if parallel else calls.closing
    opening = " ".join(
        [rules.spell(calls.marker)] * bool(calls.marker) + [lark.text(calls.opening)] * bool(calls.opening)
    )
    direct = f"{opening} {one} {end}"
    if forced:
        body = direct
    elif led or answer is not None:
        body = either([answer or f"{lark.text(hermes.REPLY)} {rules.any()}", direct])
    elif calls.marker:
        behind = lark.text(calls.opening) if calls.opening else ""
        body = either([rules.any(), f"{rules.up_to(calls.marker)} {behind} {one} {end}"])
    else:
        heads = [(rules.rule(lark.text(calls.opening + head), "[lazy]"), rest) for head, rest in calls.calls]
        body = either([rules.any(), *(f"{head} {rest} {end}" for head, rest in heads)])
    return "\n".join([f"start: {thought(rules, thinking, opened, budget)} {body}", *rules.lines])


def _objects(rules: Rules, tools: Sequence[Tool], before: str, key: str, rest: str) -> list[tuple[str, str]]:
    """Return the calls as JSON objects, written like Python's json module does, as templates show them."""
    return [
        (f'{before}{{"name": {json.dumps(tool.name)}, "{key}": ', f"{rules.rule(tool.schema())} {rest}")
        for tool in tools
    ]


def _keywords(rules: Rules, tool: Tool) -> str:
    """Return keyword arguments in the schema's order, with JSON values, which the parser accepts."""
    properties = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    first = rest = ""
    for name in reversed([name for name in properties if _IDENTIFIER.fullmatch(name)]):
        own = properties[name]
        schema = {**own, **shared} if isinstance(own, dict) else own
        value = rules.rule(f"{lark.text(name + '=')} {lark.schema(schema, lenient=not tool.strict)}")
        begun = rules.rule(f"{value} {rest}")
        skipped = either([begun, first]) if first else f"{begun}?"
        first = begun if name in required else skipped
        following = f"{lark.text(', ')} {value}"
        rest = rules.rule(f"{following if name in required else f'({following})?'} {rest}")
    return first


def closed(schema: Any) -> Any:
    """Return the schema with objects limited to the properties they list, unless they allow others."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: value if key in _VALUES else _closed_in(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OPEN & schema.keys():
        own["additionalProperties"] = False
    return own


def _closed_in(key: str, value: Any) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: closed(each) for name, each in value.items()}
    return closed(value)
