"""Builds the Lark grammar of reasoning before an answer, with an optional token budget."""

from __future__ import annotations

from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.parsers.rules import Rules, Spell, either, is_token

_GAP = r"/[ \n]{0,4}/"


def can_limit(thinking: Thinking, spell: Spell) -> bool:
    """Return whether a budget can end such reasoning: the mark must be one token, which text cannot contain."""
    return any(is_token(spell(mark)) for mark in thinking.ends)


def thought(rules: Rules, thinking: Thinking | None, opened: bool, budget: int | None = None) -> str:
    """Return an expression for optional reasoning, or for reasoning that has begun and must end.

    budget: maximum tokens before the end mark; the mark must be a token (`can_limit`)."""
    if thinking is None:
        return ""
    if not opened:
        return f"({another_thought(rules, thinking, budget)})?"
    if budget is None:
        end = either([rules.up_to(mark) for mark in thinking.ends])
    else:
        marks = [spelled for mark in thinking.ends if is_token(spelled := rules.spell(mark))]
        end = f"{rules.at_most(budget)} {either(marks)}"
    return f"{end} {rules.terminal(_GAP)}"


def another_thought(rules: Rules, thinking: Thinking, budget: int | None = None) -> str:
    """Return an expression for reasoning with both marks."""
    begin = either([rules.spell(mark) for mark in thinking.begins])
    return f"{begin} {thought(rules, thinking, opened=True, budget=budget)}"


def after_thought(spell: Spell, thinking: Thinking | None, opened: bool, answer: str, budget: int | None = None) -> str:
    """Return the Lark text of a grammar for an answer after optional reasoning; answer: Lark text, "" is any text."""
    rules = Rules(spell)
    body = rules.rule(answer) if answer else rules.any()
    return "\n".join([f"start: {thought(rules, thinking, opened, budget)} {body}", *rules.lines])
