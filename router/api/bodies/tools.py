"""Body fields for tools, tool_choice and their older names; ToolUse, the tools that one request may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, StrictBool, with_config
from typing_extensions import TypedDict

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import fail_with
from kvferry.router.text.parsers.syntax import Tool

MAX_TOOLS = 128
"""Largest number of tools in a request."""
AUTO, NONE, REQUIRED = "auto", "none", "required"
_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


@with_config(ConfigDict(extra="allow"))
class Function(TypedDict):
    """A function that the model may call; further fields are passed to the template."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[dict[str, Any] | None, Field(description="a JSON schema; absent: no parameters")]]
    strict: NotRequired[StrictBool | None]


@with_config(ConfigDict(extra="allow"))
class FunctionTool(TypedDict):
    """Tool of type function."""

    type: NotRequired[Literal["function"]]
    function: Function


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Functions = Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)]
DEPRECATED = Field(json_schema_extra={"deprecated": True})
Choice = Annotated[str | dict[str, Any] | None, fail_with("must be a string or an object")]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call in a request.

    `named`: the client named the one to call. For errors, `field` holds the choice and `place` the tools."""

    tools: tuple[Tool, ...]
    forced: bool
    named: bool
    parallel: bool | None
    field: str
    place: str


class ToolFields(BaseModel):
    """Fields of tools, and their older names `functions` and `function_call`, which allow one call at most."""

    tools: Tools | None = None
    tool_choice: Choice = None
    parallel_tool_calls: StrictBool | None = None
    functions: Annotated[Functions | None, DEPRECATED] = None
    function_call: Annotated[Choice, DEPRECATED] = None

    @property
    def legacy(self) -> bool:
        """Return whether the client used the older names, and gets its answer in them."""
        return bool(self.functions)

    def usable(self) -> list[Any] | None:
        """Return the tools in the newer form."""
        if not self.legacy:
            return self.tools
        return [{"type": "function", "function": function} for function in self.functions or []]

    def tool_use(self) -> ToolUse | None:
        """Return the use of the tools; None if none may be called. Raises InvalidRequest for an invalid choice."""
        if self.tools and self.legacy:
            raise InvalidRequest("tools and functions exclude each other; give tools", param="functions")
        place = "functions" if self.legacy else "tools"
        functions = (self.functions or []) if self.legacy else [tool["function"] for tool in self.tools or []]
        field = "function_call" if self.legacy or self.tool_choice is None else "tool_choice"
        choice = self.function_call if field == "function_call" else self.tool_choice
        if choice is None:
            choice, field = AUTO, place
        _check_duplicates(functions, place)
        if not functions:
            if choice not in (AUTO, NONE):
                raise InvalidRequest(f"{field} needs tools to choose from", param=field)
            return None
        names = {function["name"]: _tool(function) for function in functions}
        mode, chosen = _chosen(choice, field, tuple(names))
        if mode == NONE:
            return None
        return ToolUse(
            tuple(names[name] for name in chosen),
            forced=mode == REQUIRED,
            named=isinstance(choice, dict) and choice.get("type") != "allowed_tools",
            parallel=False if self.legacy else self.parallel_tool_calls,
            field=field,
            place=place,
        )


def _tool(function: Function) -> Tool:
    return Tool(
        function["name"],
        function.get("parameters") or {"type": "object", "properties": {}},
        strict=bool(function.get("strict")),
    )


def _check_duplicates(functions: Sequence[Function], place: str) -> None:
    seen: set[str] = set()
    for number, function in enumerate(functions):
        if function["name"] in seen:
            param = f"{place}[{number}].name" if place == "functions" else f"{place}[{number}].function.name"
            raise InvalidRequest(f"{param}: {function['name']!r} is used by an earlier tool", param=param)
        seen.add(function["name"])


def _chosen(choice: str | dict[str, Any], field: str, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the mode and the names of the tools that may be called; raise InvalidRequest."""
    if choice in (AUTO, NONE, REQUIRED) and isinstance(choice, str):
        return choice, names
    if isinstance(choice, str):
        raise InvalidRequest(f"{field} must be none, auto, required or an object; got {choice!r}", param=field)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        allowed = allowed if isinstance(allowed, dict) else choice
        mode, tools = allowed.get("mode", AUTO), allowed.get("tools")
        if mode not in (AUTO, REQUIRED) or not isinstance(tools, list) or not tools:
            raise InvalidRequest(f"{field}: allowed_tools needs a mode (auto or required) and tools", param=field)
        return mode, tuple(dict.fromkeys(_named(tool, field, names) for tool in tools))
    return REQUIRED, (_named(choice, field, names),)


def _named(choice: Any, field: str, names: tuple[str, ...]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}` or function_call's `{"name": ...}`."""
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if name not in names:
        param = field if field == "function_call" else f"{field}.function.name"
        raise InvalidRequest(f"{param} must name one of the tools; got {name!r}", param=param)
    return str(name)
