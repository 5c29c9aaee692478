"""Writes earlier tool calls into message text, for templates that show tools but drop calls of earlier answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.router.text.adaptations import Adaptation, Messages
from kvferry.router.text.message_shaping import object_arguments
from kvferry.router.text.parsers.derived.syntax import NAME, ToolSyntax


def written(syntax: ToolSyntax, calls: Sequence[Any]) -> str:
    """Return the calls of a message as text; arguments are JSON or Python's literals."""
    functions = [each["function"] for each in calls if isinstance(each, Mapping) and "function" in each]
    between = syntax.between or ""
    return syntax.opening + between.join(_call(syntax, each) for each in functions) + syntax.closing


def _call(syntax: ToolSyntax, function: Mapping[str, Any]) -> str:
    arguments, own, name = function.get("arguments"), syntax.arguments, str(function.get("name"))
    if own is not None:
        pairs = arguments.items() if isinstance(arguments, Mapping) else ()
        shown = own.opening + own.separator.join(f"{key}{own.before_other}{value!r}" for key, value in pairs)
    else:
        shown = json.dumps(arguments, ensure_ascii=False)
    before, after = syntax.head, syntax.close
    if syntax.envelope is not None:
        before, after = before + syntax.envelope.before, syntax.envelope.after + after
    return before.replace(NAME, name) + shown + after.replace(NAME, name)


def calls_in_content(syntax: ToolSyntax) -> Adaptation:
    """Return the rule that writes calls into the text of their messages."""
    return Adaptation("calls-in-content", partial(_spelled, syntax), ())


def _spelled(syntax: ToolSyntax, messages: Messages) -> Messages:
    return [_in_content(syntax, each) if each.get("tool_calls") else each for each in messages]


def _in_content(syntax: ToolSyntax, message: Mapping[str, Any]) -> dict[str, Any]:
    found = object_arguments(message)
    text = written(syntax, found.pop("tool_calls"))
    return {**found, "content": "\n".join(filter(None, (message["content"], text)))}
