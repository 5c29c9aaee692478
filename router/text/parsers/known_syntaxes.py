"""Tool-call syntaxes of models whose templates show no calls, or calls from which nothing can be derived.

HERMES is also the syntax that `tool_prompt` requests from models whose templates do not show tools."""

from __future__ import annotations

from dataclasses import replace

from kvferry.router.text.parsers.derived.syntax import ID, INDEX, NAME, Arguments, Envelope, Frame, ToolSyntax
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
_FUNCTIONARY_3_2 = ToolSyntax(
    opening="", head=f">>>{NAME}\n", close="", between="", closing="", frame=Frame(begun=">>>", begin=">>>all\n")
)
_KIMI_K3 = ToolSyntax(
    opening="<|open|>tools<|sep|>",
    head=f'<|open|>call tool="{NAME}" index="{INDEX}"<|sep|>',
    close="<|close|>call<|sep|>",
    between="",
    closing="<|close|>tools<|sep|>",
    arguments=Arguments(
        opening="",
        before_key='<|open|>argument key="',
        before_text='" type="string"<|sep|>',
        before_other=f'" type="{ID}"<|sep|>',
        after_text="<|close|>argument<|sep|>",
        after_other="<|close|>argument<|sep|>",
        separator="",
    ),
    frame=Frame(begin="<|open|>response<|sep|>", end="<|close|>response<|sep|>", last="<|close|>message<|sep|>"),
)
_KNOWN = {
    ">>>${recipient}": _FUNCTIONARY_3_2,
    "Kimi K3 tool calls must be mappings": _KIMI_K3,
    "<|tool_list_start|>": _LFM2,
    "List of tools: [": _LFM2,
    "<|tool_call|> followed by a JSON list": _GRANITE_3,
}
"""Syntaxes by a text of the models' templates."""
_REPLY = "directly-answer"
"""Tool by whose call Command-R+ says that it needs none."""


def chosen_syntax(derived: ToolSyntax | None, template: str) -> ToolSyntax | None:
    """Return the syntax that the template revealed, or else the known one of its model."""
    syntax = derived or known_syntax(template)
    return replace(syntax, frame=Frame(reply=_REPLY)) if syntax is not None and _REPLY in template else syntax


def known_syntax(template: str) -> ToolSyntax | None:
    """Return the syntax of the model with this template; None if it is unknown."""
    return next((syntax for text, syntax in _KNOWN.items() if text in template), None)
