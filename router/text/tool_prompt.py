"""Describes tools and calls in the prompt's text, for models whose chat template does not show them.

Calls and results are in Hermes' format, in the text of their messages, unless the template shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kvferry.router.text.parsers.derived.syntax import Form, ToolSyntax
from kvferry.router.text.parsers.derived.writing import written
from kvferry.router.text.parsers.hermes import BEGIN, END, REPLY
from kvferry.router.text.parsers.known_syntaxes import HERMES

Message = dict[str, Any]

_FORMAT = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{{tools}}
</tools>

For each function call, return a json object with function name and arguments within {BEGIN}{END} XML tags:
{BEGIN}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{END}

If no function fits the query, write {REPLY} and then your reply."""
_OWN_FORMAT = """# Tools

You may call one or more of these functions:
{tools}

Write a call exactly in this form, with a function's name for NAME and {arguments}:
{one}"""
_TOOL = """
### {name}
Description: {description}

Parameters: {parameters}"""
_ARGUMENTS = {Form.JSON: "a JSON object of its arguments for {…}"}
_OTHER_ARGUMENTS = "each argument's name for KEY and its value for VALUE"
_SEVERAL = "\n\nSeveral calls in one answer:\n"
_SYSTEM = "You are a helpful assistant."


def tools_as_text(messages: Sequence[Message], tools: Sequence[Any] | None, *, takes_system: bool) -> list[Message]:
    """Return the messages with calls and results as text, and the tools described at the beginning.

    Consecutive results share one user message, for templates that alternate roles."""
    shown: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message.get("role") in ("tool", "function")):
        if is_result:
            shown.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            shown += map(_with_calls_as_text, group)
    if tools:
        _describe(
            shown, _FORMAT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)), takes_system
        )
    return shown


def with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Any], syntax: ToolSyntax, *, takes_system: bool
) -> list[Message]:
    """Return the messages with the tools described at the beginning, for a template that shows their calls itself."""
    listed = [
        _TOOL.format(
            name=each["function"]["name"],
            description=each["function"].get("description") or "",
            parameters=json.dumps(each["function"].get("parameters") or {}, ensure_ascii=False),
        )
        for each in tools
    ]
    arguments = _ARGUMENTS.get(syntax.form, _OTHER_ARGUMENTS)
    text = _OWN_FORMAT.format(tools="\n".join(listed), arguments=arguments, one=syntax.pattern().strip())
    if syntax.between is not None:
        text += _SEVERAL + syntax.pattern(calls=2).strip()
    shown = list(messages)
    _describe(shown, text, takes_system)
    return shown


def _describe(messages: list[Message], text: str, takes_system: bool) -> None:
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") or (not takes_system and first):
        system = first.get("role") in ("system", "developer")
        parts = (first["content"], text) if system else (text, first["content"])
        messages[0] = {**first, "content": "\n\n".join(filter(None, parts))}
    else:
        messages.insert(0, {"role": "system", "content": f"{_SYSTEM}\n\n{text}"})


def _result(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls_as_text(message: Message) -> Message:
    """Return a message with its calls as text."""
    if not message.get("tool_calls"):
        return dict(message)
    lines = [message["content"], written(HERMES, message["tool_calls"])]
    return {"role": message["role"], "content": "\n".join(filter(None, lines))}
