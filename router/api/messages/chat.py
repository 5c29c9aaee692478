"""Translates a Messages API request into a chat: turns, tool results, images, thinking and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.output_grammar import limits_reasoning
from kvferry.router.api.bodies.tool_images import Part, is_image, plain, result_text
from kvferry.router.api.bodies.translated import TranslatedChat, string_in, translated
from kvferry.router.api.messages.body import CountBody, MessagesBody, Turn
from kvferry.router.api.served_models import ServedModels
from kvferry.router.media.parts import TranslatedPart
from kvferry.router.request_context import RequestContext
from kvferry.router.text.text_model import TextModel

Block = Mapping[str, Any]
Message = dict[str, Any]
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""First line of Claude Code's system text: a record for Anthropic's own servers that changes with each request, so that
with it no prompt would begin like an earlier one."""


class MessagesChat(TranslatedChat):
    """Chat translated from a Messages API request; `original` is the original body."""

    prompt_field, bound_field = "messages", "max_tokens"
    names: ClassVar[Mapping[str, str]] = MappingProxyType({
        "messages": "messages",
        "response_format": "output_config.format",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
        "prompt_cache_retention": "cache_control.ttl",
        "tools": "tools",
        "tool_choice": "tool_choice",
        "thinking_token_budget": "thinking.budget_tokens",
    })  # fmt: skip

    def reasoning_budget(self, text: TextModel) -> int | None:
        """Return the budget; None if nothing can end this model's reasoning: clients send one to every model."""
        budget = self.thinking_token_budget
        return budget if budget is not None and limits_reasoning(text) else None


async def translate(call: RequestContext, body: CountBody, pools: ServedModels) -> MessagesChat:
    """Translate the request into a chat; raise InvalidRequest naming the field."""
    return chat(body)


def chat(body: CountBody) -> MessagesChat:
    """Translate a body into a chat; raise InvalidRequest naming the field.

    A conversation that ends with an assistant message is continued there. Models whose template can switch thinking
    think only on request."""
    choice, last = body.tool_choice, body.messages[-1]
    continues = last.role == "assistant"
    config = body.output_config
    thinks = body.thinking if body.thinking is not None and body.thinking.type != "disabled" else None
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages(body),
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(config.format) if config and config.format else None,
        "reasoning_effort": config.effort if config else None,
        "prompt_cache_retention": body.longest_ttl(),
        "chat_template_kwargs": {"enable_thinking": thinks is not None},
        "thinking_token_budget": thinks.budget_tokens if thinks else None,
    }
    if isinstance(body, MessagesBody):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return translated(MessagesChat, fields, body)


def messages(body: CountBody) -> list[Message]:
    """Return the conversation as chat messages: the system text first, tool results as separate messages."""
    found: list[Message] = []
    if system := _BILLING.sub("", _words(body.system or "", "system")):
        found.append({"role": "system", "content": system})
    for place, turn in enumerate(body.messages):
        found += _turn(turn, f"messages[{place}].content")
    return found


def _turn(turn: Turn, field: str) -> list[Message]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_as_message(turn.content, field)]
    results, images, rest = list[Message](), list[Part](), list[Part]()
    for place, block in enumerate(turn.content):
        at = f"{field}[{place}]"
        if block.get("type") == "tool_result":
            parts = _result_parts(block, at)
            call = string_in(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call, "content": result_text(parts)})
            images += filter(is_image, parts)
        else:
            rest.append(_part(block, at))
    parts = [*images, *rest]
    return [*results, *([{"role": turn.role, "content": plain(parts)}] if parts or not results else [])]


def _part(block: Any, field: str) -> Part:
    """Return a text or an image as a chat's content part."""
    if not isinstance(block, dict) or block.get("type") != "image":
        return {"type": "text", "text": _text(block, field)}
    source, at = block.get("source"), f"{field}.source"
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise InvalidRequest(f"{at} must be an object of type base64 or url", param=at)
    if source["type"] == "url":
        return TranslatedPart(string_in(source, "url", at), f"{at}.url")
    url = f"data:{string_in(source, 'media_type', at)};base64,{string_in(source, 'data', at)}"
    return TranslatedPart(url, f"{at}.data")


def _as_message(blocks: Sequence[Block], field: str) -> Message:
    """Return an assistant turn's thoughts, text and calls as one message."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        at = f"{field}[{place}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(string_in(block, "thinking", at))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": string_in(block, "name", at), "arguments": arguments}
                calls.append({"id": string_in(block, "id", at), "type": "function", "function": function})
            case _:
                texts.append(_text(block, at))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result_parts(block: Block, field: str) -> list[Part]:
    """Return the content of a tool's result as a chat's content parts."""
    content = block.get("content") or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}.content must be a string or a list of blocks", param=f"{field}.content")
    return [_part(each, f"{field}.content[{place}]") for place, each in enumerate(content)]


def _words(content: str | list[Any], field: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{field}[{place}]") for place, block in enumerate(content))


def _text(block: Any, field: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{field}.type: blocks of type {kind!r} are not supported here", param=f"{field}.type")
    return string_in(block, "text", field)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    return {
        "type": "function",
        "function": {**function, **{k: tool[k] for k in ("description", "strict") if k in tool}},
    }


def _tool_choice(body: CountBody) -> Any:
    """Return the chat's tool_choice; auto and none without tools are dropped."""
    choice = body.tool_choice
    if choice is None or (not body.tools and choice.type in ("auto", "none")):
        return None
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if not choice.name:
        raise InvalidRequest("tool_choice.name must name one of the tools", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format must be of type json_schema, with a schema", param="output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}
