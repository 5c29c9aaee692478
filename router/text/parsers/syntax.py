"""Builds the Lark grammar of outputs with tools in any call syntax: free text, reasoning and well-formed calls.

Each family has its own call format. The parts around calls are common: reasoning, free text, one call or more. Markers
that are in the vocabulary are matched as their tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.text.parsers import hermes
from kvferry.router.text.parsers.derived.syntax import UNFRAMED, Frame
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.parsers.rules import SPECIAL, Rules, Spell, either, is_token
from kvferry.router.text.parsers.thought_grammar import another_thought, thought
from kvferry.structured_output import lark

_VALUES = frozenset(("enum", "const", "default", "examples"))
"""JSON schema keywords whose values are not schemas."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""JSON schema keywords whose values map names to schemas."""
_LINE = "\n"
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
    between  Lark text; None: there is one call at most
    frame    marks around text
    reply    like `calls`, for a call after which the answer is text
    """

    marker: str
    opening: str
    calls: Sequence[tuple[str, str]]
    between: str | None
    closing: str
    frame: Frame = UNFRAMED
    reply: Sequence[tuple[str, str]] = ()


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
    budget: int | None = None,
) -> str:
    """Return the Lark text of the grammar.

    tools     tools that may be called
    forced    there must be a call; otherwise the answer may be text
    led       text must begin with hermes.REPLY (see `tool_prompt`)
    thinking  reasoning that may come first; `opened`: it has begun
    answer    Lark text of a structured answer
    budget    maximum tokens of reasoning
    """
    rules = Rules(spell)
    calls = writer(rules, tools)
    frame = calls.frame
    one = rules.rule(_begun(spell, calls.calls))
    after, last = (f"({spell(mark)})?" if mark else "" for mark in (frame.end, frame.last))
    behind = spell(calls.opening) if calls.opening else ""
    further = [] if not parallel or calls.between is None else [f"{calls.between} {one}"]
    if further and calls.marker and thinking is not None and budget is None:
        again = f"{lark.text(_LINE)}? {another_thought(rules, thinking)} {spell(calls.marker)}"
        further.append(f"{calls.closing} {again} {behind} {one}")
    end = f"{either(further)}* {calls.closing} {last}" if further else f"{calls.closing} {last}"
    direct = f"{after} {spell(calls.marker) if calls.marker and not frame.begun else ''} {behind} {one} {end}"
    if forced:
        body = direct
    elif led or answer is not None:
        body = either([f"{answer or f'{lark.text(hermes.REPLY)} {rules.any()}'} {after} {last}", direct])
    elif calls.marker:
        begin = lark.text(frame.begin.removeprefix(frame.begun)) if frame.begun else ""
        before = _thoughts_within(rules, thinking) if budget is None else ""
        until = f"{begin} {before} {_up_to(rules, calls.marker, after)} {behind}"
        options = [f"{begin} {rules.any()} {after} {last}", f"{until} {one} {end}", *([direct] if begin else [])]
        if calls.reply:
            options.append(f"{until} {_begun(spell, calls.reply)} {calls.closing} {rules.any()}")
        body = either(options)
    else:
        heads = [(_lazy(rules, calls.opening + head), rest) for head, rest in calls.calls]
        replies = [f"{_lazy(rules, calls.opening + head)} {rest} {calls.closing} {rules.any()}"
                   for head, rest in calls.reply]  # fmt: skip
        body = either([rules.any(), *(f"{head} {rest} {end}" for head, rest in heads), *replies])
    return "\n".join([f"start: {thought(rules, thinking, opened, budget)} {body}", *rules.lines])


def _thoughts_within(rules: Rules, thinking: Thinking | None) -> str:
    """Return an expression for free text with reasoning behind it, repeated, if tokens mark the reasoning."""
    if thinking is None or not all(is_token(rules.spell(mark)) for mark in (*thinking.begins, *thinking.ends)):
        return ""
    return f"({rules.any()} {another_thought(rules, thinking)})*"


def _begun(spell: Spell, calls: Sequence[tuple[str, str]]) -> str:
    return either([f"{spell(head)} {rest}" if head else rest for head, rest in calls])


def _up_to(rules: Rules, marker: str, after: str) -> str:
    """Return an expression for free text up to a marker, with `after` before it."""
    spelled = rules.spell(marker)
    return f"{rules.any()} {after} {spelled}" if after and is_token(spelled) else rules.up_to(marker)


def _lazy(rules: Rules, head: str) -> str:
    """Return an expression for the text that begins a call and no other answer, up to its first token."""
    spelled = rules.spell(head)
    found = re.search(rf"(?<= ){SPECIAL}", spelled)
    if found is None:
        return rules.rule(spelled, "[lazy]")
    return f"{rules.rule(spelled[: found.start()], '[lazy]')} {spelled[found.start() :]}"


def ordered(rules: Rules, parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return an expression for parts in this order, of which those that are not required may be left out.

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
    """Return the schema with objects limited to the properties they list, unless they allow further ones."""
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
