"""Builds the Lark grammar of tool calls in a derived syntax."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvferry.router.text.parsers.derived.syntax import ID, INDEX, NAME, ToolSyntax
from kvferry.router.text.parsers.derived.value_grammar import ValueGrammar
from kvferry.router.text.parsers.rules import Rules
from kvferry.router.text.parsers.syntax import Calls, Tool

_NUMBERS = (ID, INDEX)
_NOTHING = {"type": "object", "properties": {}}
_DIGITS = r"/[0-9]{1,4}/"


def calls(syntax: ToolSyntax, rules: Rules, tools: Sequence[Tool]) -> Calls:
    """Return the syntax's calls of these tools, for `syntax.grammar`."""
    marker = syntax.marker if syntax.is_marked else ""
    head = syntax.head if syntax.opening else syntax.head[len(marker) :]
    between = None if syntax.between is None else expression(syntax, rules, syntax.between)
    if between is not None and not syntax.opening and marker:
        between = f"{between} {rules.spell(marker)}"
    reply = [_call(syntax, head, rules, Tool(syntax.frame.reply, _NOTHING))] if syntax.frame.reply else []
    return Calls(
        marker,
        syntax.opening[len(marker) :] if syntax.opening else "",
        [_call(syntax, head, rules, tool) for tool in tools],
        between,
        expression(syntax, rules, syntax.closing),
        syntax.frame,
        reply,
    )


def _call(syntax: ToolSyntax, head: str, rules: Rules, tool: Tool) -> tuple[str, str]:
    """Return the text that begins a call, and the expression for the rest."""
    form, envelope = syntax.arguments, syntax.envelope
    if form is not None:
        values = ValueGrammar(rules, tool, form, is_literal=syntax.is_literal)
        head, arguments, after = head + form.opening, values.arguments(), ""
        if form.none and not tool.parameters.get("required"):
            arguments = f"({arguments} | {rules.spell(form.none)})" if arguments else rules.spell(form.none)
    elif envelope is not None:
        head, arguments, after = head + envelope.before, rules.rule(tool.schema()), envelope.after
    else:
        arguments, after = rules.rule(tool.schema()), ""
    head, after = head.replace(NAME, tool.name), (after + syntax.close).replace(NAME, tool.name)
    cut = min((at for each in _NUMBERS if (at := head.find(each)) >= 0), default=len(head))
    return head[:cut], f"{expression(syntax, rules, head[cut:])} {arguments} {expression(syntax, rules, after)}"


def expression(syntax: ToolSyntax, rules: Rules, text: str) -> str:
    """Return the expression for a text of the syntax, with patterns for the placeholders of ids and numbers."""
    length = syntax.id_length
    ids = rf"/[A-Za-z0-9]{{{length}}}/" if length else r"/[A-Za-z0-9_.:-]{1,64}/"
    parts = re.split(f"([{ID}{INDEX}])", text)
    return " ".join(
        rules.terminal(ids if part == ID else _DIGITS) if part in _NUMBERS else rules.spell(part)
        for part in parts
        if part
    )
