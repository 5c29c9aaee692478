"""Call syntax of the hand-written parser families (hermes, llama3_json, mistral, pythonic), for grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from kvferry.router.text.parsers import hermes, mistral
from kvferry.router.text.parsers.rules import Rules, is_token
from kvferry.router.text.parsers.syntax import Calls, Tool, Writer, ordered
from kvferry.structured_output import lark

_LINE = "\n"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _hermes(rules: Rules, tools: Sequence[Tool]) -> Calls:
    rest = f"{lark.text('}' + _LINE)} {rules.spell(hermes.END)}"
    calls = _objects(rules, tools, _LINE, "arguments", rest)
    return Calls(hermes.BEGIN, "", calls, f"{lark.text(_LINE)} {rules.spell(hermes.BEGIN)}", "")


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


WRITERS: Mapping[str, Writer] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}


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
    pairs = []
    for name in [name for name in properties if _IDENTIFIER.fullmatch(name)]:
        own = properties[name]
        schema = {**own, **shared} if isinstance(own, dict) else own
        value = rules.rule(f"{lark.text(name + '=')} {lark.schema(schema, lenient=not tool.strict)}")
        pairs.append((value, name in required))
    return ordered(rules, pairs, lark.text(", "))
