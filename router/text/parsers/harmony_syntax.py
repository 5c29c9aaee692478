"""Builds the Lark grammar of harmony (gpt-oss) outputs with tools or a structured answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.text.parsers.harmony import ANALYSIS, COMMENTARY, END, FINAL, FUNCTIONS, MARKS, MESSAGE, ROLE
from kvferry.router.text.parsers.rules import Rules, Spell, either
from kvferry.router.text.parsers.syntax import Tool
from kvferry.structured_output import lark

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, *_ = MARKS


def grammar(
    tools: Sequence[Tool],
    spell: Spell,
    *,
    forced: bool,
    parallel: bool,
    lead: str,
    answer: str | None = None,
    budget: int | None = None,
) -> str:
    """Return the Lark text of the grammar.

    tools   tools that may be called
    forced  there must be a call; otherwise the answer may be text
    lead    the message that the prompt has begun
    answer  Lark text of a structured answer; text before calls is then not allowed
    budget  maximum tokens of reasoning, which is then at most one message before the rest
    """
    rules = Rules(spell)
    free = rules.any()
    thinking = free if budget is None else rules.at_most(budget)
    final_text = free if answer is None else rules.rule(answer)
    on = rules.rule(f"{spell(_END)} {spell(_START)} {lark.text(ROLE)}")
    thought = rules.rule(f"{_head(spell, ANALYSIS)} {thinking} {on}")
    before = [] if forced or answer is not None else [rules.rule(f"{_head(spell, COMMENTARY)} {free} {on}")]
    calls = rules.rule(either([_call(rules, tool) for tool in tools])) if tools else ""
    if tools and parallel:
        between = f"{thought}*" if budget is None else ""
        calls = f"{calls} ({on} {between} {calls})*"
    final = f"{_head(spell, FINAL, constrained=answer is not None)} {final_text}"
    first = f"{either([thought, *before])}*"
    if budget is not None:
        first = " ".join([f"{thought}?", *(f"{each}*" for each in before)])
    row = f"{first} {calls if forced else either([final, calls]) if calls else final}"
    return "\n".join([f"start: {_after(lead, row, thinking, final_text, on, forced=forced)}", *rules.lines])


def _after(lead: str, row: str, thinking: str, final_text: str, on: str, *, forced: bool) -> str:
    """Return the start rule, which continues the prompt's message if that is past its head."""
    head, _, body = lead.partition(MESSAGE)
    if END in body or MESSAGE not in lead:
        return row
    if forced or ANALYSIS in head:
        return f"{thinking} {on} {row}"
    return f"{final_text} ({on} {row})?"


def _head(spell: Spell, channel: str, *, constrained: bool = False) -> str:
    """Return the head of a message; `constrained`: it may declare its content as JSON."""
    kind = f'(" "? {spell(_CONSTRAIN)} "json")? ' if constrained else ""
    return f"{spell(_CHANNEL)} {lark.text(channel)} {kind}{spell(_MESSAGE)}"


def _call(rules: Rules, tool: Tool) -> str:
    """Return the rule of a call, with its recipient after or before the channel, since models write both."""
    spell, to = rules.spell, f" to={FUNCTIONS}{tool.name}"
    rest = rules.rule(f'" "? {spell(_CONSTRAIN)}? "json" {spell(_MESSAGE)} {rules.rule(tool.schema())}')
    behind = f"{spell(_CHANNEL)} {lark.text(COMMENTARY + to)} {rest}"
    return either([behind, f"{lark.text(to)} {spell(_CHANNEL)} {lark.text(COMMENTARY)} {rest}"])
