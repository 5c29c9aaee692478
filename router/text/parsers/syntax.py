"""Lark grammar for outputs with tools: a call that begins is always well formed.

Each family has its own call format. The parts around calls are common: reasoning, free text, one call or more. Markers
in the vocabulary stand for their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.text.parsers import hermes
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.structured_output import lark

_ANY = r"/(.|\n)*/"
_SPECIAL = r"<\[\d+\]>"
_GAP = r"/[ \n]{0,4}/"
_VALUES = frozenset(("enum", "const", "default", "examples"))
"""JSON schema keywords whose values are no schemas."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""JSON schema keywords whose values map names to schemas."""
_OPEN = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)

Spell = Callable[[str], str]
"""Returns the Lark text of a marker: a token if the vocabulary has it, else text."""


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


class Rules:
    """Collector of grammar rules; each method returns an expression for its arguments."""

    def __init__(self, spell: Spell) -> None:
        self.spell = spell
        self.lines: list[str] = []
        self.literal: str | None = None
        """Rule of any value in a derived syntax, once there is one."""

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def any(self) -> str:
        """Return an expression for free text, possibly empty."""
        return self.terminal(_ANY)

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def up_to(self, marker: str) -> str:
        """Return an expression for free text up to and including the first such marker."""
        spelled = self.spell(marker)
        if (found := re.search(rf"(?<= ){_SPECIAL}", spelled)) is not None:
            return self._up_to_token(json.loads(spelled[: found.start()]), spelled[found.start() :])
        if is_token(spelled):
            return f"({self.any()} {spelled})"
        return self.rule(f"{self.any()} {spelled}", "[lazy]")

    def _up_to_token(self, text: str, rest: str) -> str:
        """Return an expression for free text that ends with this text, before a token."""
        escaped = "\n".join(map(re.escape, text.split("\n")))
        begun = self.terminal(lark.terminal(r"(.|\n)*" + escaped))
        return f"({begun} {rest})"


@dataclass(frozen=True, slots=True)
class Calls:
    """Call syntax of a family: marker, `opening`, one call or more with `between` them, then `closing`.

    marker   opens calls within free text; empty: calls are the whole answer, which begins unlike text
    opening  text after the marker
    calls    for each tool, the text that begins its call, and Lark text for the rest
    between  Lark text; None: there is one call at most
    """

    marker: str
    opening: str
    calls: Sequence[tuple[str, str]]
    between: str | None
    closing: str


Writer = Callable[[Rules, Sequence[Tool]], Calls]
"""Returns the call syntax of a family for these tools."""


def grammar(
    writer: Writer,
    tools: Sequence[Tool],
    spell: Spell,
    *,
    forced: bool,
    parallel: bool,
    led: bool = False,
    thinking: Thinking | None = None,
    opened: bool = False,
    answer: str | None = None,
) -> str:
    """Return the Lark text of the grammar.

    tools     tools that may be called
    forced    there must be a call; otherwise the answer may be text
    led       text must begin with hermes.REPLY (see `tool_prompt`)
    thinking  reasoning that may come first; `opened`: it has begun
    answer    Lark text of a structured answer
    """
    rules = Rules(spell)
    calls = writer(rules, tools)
    one = rules.rule(either([f"{spell(head)} {rest}" if head else rest for head, rest in calls.calls]))
    end = calls.closing if not parallel or calls.between is None else f"({calls.between} {one})* {calls.closing}"
    behind = spell(calls.opening) if calls.opening else ""
    direct = f"{spell(calls.marker) if calls.marker else ''} {behind} {one} {end}"
    if forced:
        body = direct
    elif led or answer is not None:
        body = either([answer or f"{lark.text(hermes.REPLY)} {rules.any()}", direct])
    elif calls.marker:
        body = either([rules.any(), f"{rules.up_to(calls.marker)} {behind} {one} {end}"])
    else:
        heads = [(_lazy(rules, calls.opening + head), rest) for head, rest in calls.calls]
        body = either([rules.any(), *(f"{head} {rest} {end}" for head, rest in heads)])
    return "\n".join([f"start: {_thought(rules, thinking, opened)} {body}", *rules.lines])


def _lazy(rules: Rules, head: str) -> str:
    """Return an expression for the text that begins a call and no other answer, up to its first token."""
    spelled = rules.spell(head)
    found = re.search(rf"(?<= ){_SPECIAL}", spelled)
    if found is None:
        return rules.rule(spelled, "[lazy]")
    return f"{rules.rule(spelled[: found.start()], '[lazy]')} {spelled[found.start() :]}"


def after_thought(spell: Spell, thinking: Thinking | None, opened: bool, answer: str) -> str:
    """Return the Lark text of a grammar for an answer after optional reasoning."""
    rules = Rules(spell)
    body = rules.rule(answer)
    return "\n".join([f"start: {_thought(rules, thinking, opened)} {body}", *rules.lines])


def _thought(rules: Rules, thinking: Thinking | None, opened: bool) -> str:
    """Return an expression for optional reasoning, or for reasoning that has begun and must end."""
    if thinking is None:
        return ""
    gap = rules.terminal(_GAP)
    end = either([rules.up_to(mark) for mark in thinking.ends])
    if opened:
        return f"{end} {gap}"
    return f"({either([rules.spell(mark) for mark in thinking.begins])} {end} {gap})?"


def ordered(rules: Rules, parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return an expression for parts in this order, those that are not required left out at will.

    parts: each part's expression, and whether it is required. separator: Lark text; empty: there is none."""
    if not separator:
        return " ".join(part if required else f"{part}?" for part, required in parts)
    first = rest = ""
    for part, required in reversed(parts):
        begun = rules.rule(f"{part} {rest}")
        skipped = either([begun, first]) if first else f"{begun}?"
        first = begun if required else skipped
        following = f"{separator} {part}"
        rest = rules.rule(f"{following if required else f'({following})?'} {rest}")
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


def either(options: Sequence[str]) -> str:
    """Return a Lark alternative of the options."""
    return f"({' | '.join(options)})"


def has_token(spelled: str) -> bool:
    """Return whether the spelling holds a special token."""
    return re.search(rf"(?:^| ){_SPECIAL}", spelled) is not None


def is_token(spelled: str) -> bool:
    """Return whether the spelling names a special token."""
    return spelled.startswith("<")
