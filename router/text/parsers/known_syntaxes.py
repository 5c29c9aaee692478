"""Tool-call syntaxes of models whose templates show tools but no calls, so that nothing can be derived from them.

HERMES is also the syntax that `tool_prompt` requests from models whose templates do not show tools."""

from __future__ import annotations

from kvferry.router.text.parsers.derived.syntax import NAME, Arguments, Envelope, ToolSyntax
from kvferry.router.text.parsers.hermes import BEGIN, END

HERMES = ToolSyntax(
    opening="",
    head=f"{BEGIN}\n",
    close=f"\n{END}",
    between="\n",
    closing="",
    envelope=Envelope(f'{{"name": "{NAME}", "arguments": ', "}", "name", "arguments"),
)
_LFM2 = ToolSyntax(
    opening="<|tool_call_start|>[",
    head=NAME,
    close=")",
    between=", ",
    closing="]<|tool_call_end|>",
    arguments=Arguments(
        opening="(",
        before_key="",
        before_text="='",
        before_other="=",
        after_text="'",
        after_other="",
        separator=", ",
        words=("True", "False", "None"),
        as_json=False,
        escaped=True,
    ),
)
_GRANITE_3 = ToolSyntax(
    opening="<|tool_call|>[",
    head="",
    close="",
    between=", ",
    closing="]",
    envelope=Envelope(f'{{"name": "{NAME}", "arguments": ', "}", "name", "arguments"),
)
_KNOWN = {
    "<|tool_list_start|>": _LFM2,
    "List of tools: [": _LFM2,
    "<|tool_call|> followed by a JSON list": _GRANITE_3,
}
"""Syntaxes by a text of the models' templates."""


def known_syntax(template: str) -> ToolSyntax | None:
    """Return the syntax of the model with this template; None if it is unknown."""
    return next((syntax for text, syntax in _KNOWN.items() if text in template), None)
