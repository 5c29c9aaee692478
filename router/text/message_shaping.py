"""Normalises a chat message for templates: one text as content, common field names, arguments as objects or text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.protocol.errors import InvalidRequest

MAX_PARTS = 8192
"""Largest number of parts in a message's content."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which clients send an assistant's earlier reasoning; the first that is given counts."""

_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")
"""Types of content parts that are media, which messages for a text template cannot have."""

Message = Mapping[str, Any]


def shaped(message: Message, place: int) -> dict[str, Any]:
    """Return a message with text content and the templates' field names.

    Fields that are null are left out, since templates would write them as None. Raises InvalidRequest naming the
    field."""
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = _flat(message.get("content"), f"messages[{place}].content")
    calls = found.pop("tool_calls", None)
    legacy = found.pop("function_call", None)
    if not calls and isinstance(legacy, Mapping):
        calls = [{"type": "function", "function": legacy}]
    if calls:
        found["tool_calls"] = calls
    reasoning = next((found[name] for name in _REASONING if found.get(name)), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def object_arguments(message: Message) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, where they are JSON."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if calls else dict(message)


def text_arguments(message: Message) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_written_call(call) for call in calls]} if calls else dict(message)


def has_tools(message: Message) -> bool:
    """Return whether the message has calls or a result."""
    return message.get("role") in ("tool", "function") or bool(message.get("tool_calls"))


def joined(texts: Sequence[str]) -> str:
    """Return texts as one, with a blank line between those that are not empty."""
    return "\n\n".join(filter(None, texts))


def _flat(content: Any, field: str) -> str:
    """Return content as one string; text parts are joined by newlines, as in other servers."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{field} must have at most {MAX_PARTS} parts, got {len(content)}", param=field)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else part.get("refusal") if kind == "refusal" else None
        if not isinstance(text, str):
            raise InvalidRequest(_unsupported(kind), param=f"{field}[{place}]")
        texts.append(text)
    return "\n".join(texts)


def _unsupported(kind: Any) -> str:
    """Return the message about a content part of an unsupported type."""
    found = f"content parts of type {kind!r} are not supported"
    return f"{found} here, only text" if kind in _MEDIA else f"{found}, only text, {', '.join(_MEDIA)}"


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _written_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def calls_apart(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a message with its calls in a message of their own, without content."""
    if not message.get("tool_calls"):
        return [message]
    content = {key: each for key, each in message.items() if key != "tool_calls"}
    return [*([content] if content["content"] else []), {**message, "content": None}]


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its content as a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
