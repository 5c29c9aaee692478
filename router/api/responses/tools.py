"""Translates tools of a Responses API request into chat functions, and their names back in the answer.

A namespace's tools become functions named `namespace__name`. A custom tool, whose input is free text, becomes a
function with one string; the model reads the grammar of its input in the description."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.protocol.errors import InvalidRequest

INPUT = "input"
"""Name of the parameter that holds a custom tool's input."""
JOIN = "__"
"""Joins a namespace and a tool's name; names of functions may hold neither dots nor colons."""
_HOSTED = re.compile(r"web_search|file_search|code_interpreter|computer|image_generation|mcp|local_shell|shell")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_FIELDS = ("description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it. place: where the request holds it. function: its form in a chat."""

    name: str
    namespace: str | None
    is_custom: bool
    place: str
    function: dict[str, Any]

    @property
    def called(self) -> str:
        """Return the name under which the model calls it."""
        return qualified(self.name, self.namespace)


def qualified(name: str, namespace: str | None) -> str:
    """Return the name of the function for a tool of this namespace; None for a tool outside of namespaces."""
    return f"{namespace}{JOIN}{name}" if namespace else name


def client_tools(given: Sequence[Mapping[str, Any]] | None) -> list[ClientTool]:
    """Return the tools in the order of the request; raise InvalidRequest for tools that would run on the server."""
    found: dict[str, ClientTool] = {}
    for place, tool in enumerate(given or ()):
        for each in _inside(tool, f"tools[{place}]"):
            if each.namespace and _NAME.fullmatch(each.called) is None:
                problem = f"must, with its namespace ({each.called!r}), be at most 64 letters, digits, '_' and '-'"
                raise InvalidRequest(f"{each.place}.name {problem}", param=f"{each.place}.name")
            if (earlier := found.setdefault(each.called, each)) is not each:
                problem = f"{each.called!r} is used by {earlier.place}"
                raise InvalidRequest(f"{each.place}.name: {problem}", param=f"{each.place}.name")
    return list(found.values())


def input_of(arguments: str) -> str:
    """Return a custom tool's input from the arguments of its call; of a call that was cut off, its text."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """Return the arguments of a custom tool's call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def relocated(error: InvalidRequest, tools: Sequence[ClientTool]) -> InvalidRequest:
    """Return the error with a function's place in the chat replaced by the tool's place in the request."""
    found = re.match(r"tools\[(\d+)\]", error.param or "")
    if found is None or error.param is None or int(found[1]) >= len(tools):
        return error
    place = tools[int(found[1])].place
    return InvalidRequest(error.message.replace(found[0], place, 1), param=place + error.param[found.end() :])


def _inside(tool: Mapping[str, Any], place: str) -> Iterator[ClientTool]:
    """Yield the tool, or the tools of a namespace."""
    if tool.get("type") != "namespace":
        yield _tool(tool, place, None)
        return
    namespace, tools = _named(tool, place), tool.get("tools")
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise InvalidRequest(f"{place}.tools must be a list of objects", param=f"{place}.tools")
    for number, each in enumerate(tools):
        yield _tool(each, f"{place}.tools[{number}]", namespace)


def _tool(tool: Mapping[str, Any], place: str, namespace: str | None) -> ClientTool:
    kind, at = tool.get("type"), f"{place}.type"
    if kind not in ("function", "custom"):
        hosted = isinstance(kind, str) and _HOSTED.match(kind) is not None
        remedy = "; this server runs no tools itself: leave it out" if hosted else ""
        known = "'function' and 'custom'" if namespace else "'function', 'custom' and 'namespace'"
        raise InvalidRequest(f"{at}: tools of type {kind!r} are not supported, only {known}{remedy}", param=at)
    name = _named(tool, place)
    kept = _custom(tool, place) if kind == "custom" else tool
    fields = {field: kept[field] for field in _FUNCTION_FIELDS if kept.get(field) is not None}
    return ClientTool(name, namespace, kind == "custom", place, {"name": qualified(name, namespace), **fields})


def _named(tool: Mapping[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place}.name must be a string that is not empty", param=f"{place}.name")
    return name


def _custom(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the function of a custom tool: a regular expression becomes the string's pattern."""
    schema: dict[str, Any] = {"type": "string"}
    lines = [tool["description"]] if isinstance(tool.get("description"), str) else []
    match tool.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(definition)}:
            schema["pattern"] = f"^(?:{definition})$"
        case {"type": "grammar", "syntax": "lark", "definition": str(definition)}:
            lines.append(f"The {INPUT} is plain text of this Lark grammar:\n{definition}")
        case _:
            known = "text, or grammar with syntax lark or regex and a definition"
            raise InvalidRequest(f"{place}.format must be of type {known}", param=f"{place}.format")
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return {"description": "\n".join(lines) or None, "parameters": parameters}
