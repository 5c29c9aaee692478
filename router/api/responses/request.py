"""ResponsesRequest: one Responses API request, its translation into a chat, and the fields its response repeats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import SamplingFields
from kvferry.router.api.bodies.session_fields import SessionFields
from kvferry.router.api.bodies.translated import TranslatedChat, translated
from kvferry.router.api.responses.body import ResponsesBody
from kvferry.router.api.responses.items import Item, messages
from kvferry.router.api.responses.tools import ClientTool, client_tools, qualified, relocated

_REPEATED = (
    "background", "instructions", "max_output_tokens", "metadata", "previous_response_id", "tool_choice", "tools",
    "top_logprobs", "truncation", "user",
)  # fmt: skip
_DEFAULTS = MappingProxyType({
    "background": False, "metadata": {}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "truncation": "disabled",
})  # fmt: skip


class ResponsesChat(TranslatedChat):
    """Chat translated from a Responses API request; `original` is a ResponsesRequest."""

    prompt_field, bound_field = "input", "max_output_tokens"
    names: ClassVar[Mapping[str, str]] = MappingProxyType({
        "messages": "input",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "tools": "tools",
        "tool_choice": "tool_choice",
    })  # fmt: skip

    @property
    def is_background(self) -> bool:
        """Return whether nobody waits for the response: it is generated in the background, or its tier is flex."""
        return bool(self.original.body.background) or super().is_background


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One request of the Responses API.

    name     unique name in the ids of its response and items
    items    its input in normal form
    history  items of the responses that it continues, input and output
    keep     stores the final response with these fields; never raises
    kept     true if the response is stored
    created  seconds since 1970
    """

    name: str
    body: ResponsesBody
    items: list[Item]
    history: list[Item]
    keep: Callable[[dict[str, Any]], Awaitable[None]]
    kept: bool
    created: int

    @property
    def id(self) -> str:
        """Return the response's id."""
        return f"resp_{self.name}"

    def response(self, model: str, status: str, drawing: Mapping[str, float]) -> dict[str, Any]:
        """Return the response without output; `drawing` holds temperature and top_p."""
        body = self.body
        repeated = {name: getattr(body, name) for name in _REPEATED}
        shown = {name: _DEFAULTS.get(name) if value is None else value for name, value in repeated.items()}
        effort, summary = (body.reasoning.effort, body.reasoning.summary) if body.reasoning else (None, None)
        text = body.text.model_dump(exclude_none=True) if body.text else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": summary},
            "service_tier": body.tier_used(is_background=bool(body.background)),
            "store": self.kept,
            "text": {"format": {"type": "text"}, **text},
            "usage": None,
            **drawing,
            **shown,
        }

    def chat(self, conversation: list[Item] | None = None) -> ResponsesChat:
        """Return the chat of a conversation, by default history and items; raise InvalidRequest naming the field."""
        body = self.body
        tools, choice = client_tools(body.tools), body.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            tools, choice = _allowed(tools, choice)
        items = [*self.history, *self.items] if conversation is None else conversation
        fields = {
            **{name: getattr(body, name) for name in SamplingFields.model_fields},
            "model": body.model,
            "messages": messages(items, body.instructions),
            "response_format": _response_format(body.text.format if body.text else None),
            "tools": [{"type": "function", "function": tool.function} for tool in tools] or None,
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": body.shows_logprobs,
            "top_logprobs": body.top_logprobs if body.shows_logprobs else None,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
            "chat_template_kwargs": body.chat_template_kwargs,
            "cache_salt": body.cache_salt,
            **{name: getattr(body, name) for name in SessionFields.model_fields},
            "stream": body.stream,
            "service_tier": body.service_tier,
            "priority": body.priority,
        }
        try:
            return translated(ResponsesChat, fields, self)
        except InvalidRequest as error:
            raise relocated(error, tools) from error


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        known = "an object of type function or custom (with a name) or allowed_tools"
        raise InvalidRequest(f"tool_choice must be none, auto, required, or {known}", param="tool_choice")
    return {"type": "function", "function": {"name": qualified(choice["name"], choice.get("namespace"))}}


def _allowed(tools: list[ClientTool], choice: dict[str, Any]) -> tuple[list[ClientTool], str]:
    """Return the tools that tool_choice allows, and the mode: auto or required."""
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode must be auto or required, and tools a list", param="tool_choice")
    names = {
        qualified(tool["name"], tool.get("namespace"))
        for tool in allowed
        if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    }
    return [tool for tool in tools if tool.called in names], mode


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the chat's response_format; None for plain text."""
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        return given
    inner = {name: given[name] for name in ("name", "schema", "strict", "description") if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": inner}
