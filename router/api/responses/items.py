"""Input and output items of the Responses API: validation, normal form, and translation into chat messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.tool_images import Part, is_image, plain, result_text
from kvferry.router.api.bodies.translated import string_in
from kvferry.router.api.responses.tools import arguments_of, qualified
from kvferry.router.media.parts import TranslatedPart, audio_url, check_detail

Item = dict[str, Any]

_INPUT_ROLES = ("user", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Content parts that are text, and the field that holds it."""
_CALLS = ("function_call", "custom_tool_call")
_MCP_TOOLS = "mcp_list_tools"
"""Item in which a client lists the tools of an MCP server. It is kept and returned as given; no model sees it."""
_OWN_ID = re.compile(r"(msg|fc|ctc|rs|in)_(.+)_(\d{1,6})")


def normal(given: str | Sequence[Any], name: str) -> list[Item]:
    """Return a request's `input` as items in normal form, each with an id, and messages with parts.

    `name` makes the ids of items without one. Raises InvalidRequest naming the field."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    return [_normal(item, f"input[{place}]", f"in_{name}_{place}") for place, item in enumerate(given)]


def response_of(item_id: str) -> tuple[str, bool, int] | None:
    """Return an item's response, whether it is an input item, and its place; None for an unknown id."""
    found = _OWN_ID.fullmatch(item_id)
    return None if found is None else (f"resp_{found[2]}", found[1] == "in", int(found[3]))


def messages(items: Iterable[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """Return the items as a chat; an assistant's consecutive reasoning, text and calls form one message."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    images: list[Part] = []  # images of tool results, for the next user message
    for item in items:
        match item["type"]:
            case "function_call_output" | "custom_tool_call_output":
                parts = _chat_parts(item["output"])
                chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": result_text(parts)})
                images += filter(is_image, parts)
            case "message" if item["role"] == "user":
                chat.append({"role": "user", "content": plain([*images, *_chat_parts(item["content"])])})
                images = []
            case kind if kind != _MCP_TOOLS:
                if images:
                    chat.append({"role": "user", "content": images})
                    images = []
                if kind == "message" and item["role"] != "assistant":
                    chat.append({"role": item["role"], "content": _text(item["content"])})
                else:
                    _add_to_turn(_turn(chat, kind), item)
    return [*chat, *([{"role": "user", "content": images}] if images else [])]


def _turn(chat: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the assistant message for an item of this kind: the last one if it still takes it, else a new one."""
    last = chat[-1] if chat else {}
    begun = last.get("role") == "assistant"
    if begun and (kind in _CALLS or (kind == "message" and not last.get("content") and "tool_calls" not in last)):
        return last
    chat.append({"role": "assistant", "content": None})
    return chat[-1]


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    match item["type"]:
        case "message":
            turn["content"] = _text(item["content"])
        case "reasoning":
            turn["reasoning_content"] = _text([*(item.get("content") or ()), *item["summary"]])
        case _:
            arguments = item["arguments"] if item["type"] == "function_call" else arguments_of(item["input"])
            function = {"name": qualified(item["name"], item.get("namespace")), "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _chat_parts(parts: str | Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the content of a user's message, or of a tool's result, as a chat's content parts."""
    if isinstance(parts, str):
        return [{"type": "text", "text": parts}]
    return [_chat_part(part) for part in parts]


def _chat_part(part: Mapping[str, Any]) -> Part:
    field = part.field if isinstance(part, _Medium) else "previous_response_id"
    if part["type"] == "input_image":
        return TranslatedPart(part["image_url"], field)
    if part["type"] == "input_audio":
        return TranslatedPart(audio_url(part["input_audio"], field), field, "audio_url")
    return {"type": "text", "text": _text([part])}


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part[_TEXTS.get(part["type"], "text")] for part in parts)


def _normal(item: Any, field: str, name: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{field} must be an object", param=field)
    kind = item.get("type") or ("message" if "role" in item else None)
    own = {"id": item["id"] if isinstance(item.get("id"), str) and item["id"] else name}
    match kind:
        case "message":
            return {**own, **_message(item, field), "status": "completed", "type": kind}
        case "function_call" | "custom_tool_call":
            value_key = "arguments" if kind == "function_call" else "input"
            parts = ("call_id", "name", value_key, *(("namespace",) if item.get("namespace") else ()))
            return {
                **own,
                **{part: string_in(item, part, field) for part in parts},
                "status": "completed",
                "type": kind,
            }
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            shown = (
                output if isinstance(output, str) else _parts(output, f"{field}.output", "input_text", media=_OF_TOOLS)
            )
            return {**own, "call_id": string_in(item, "call_id", field), "output": shown, "status": "completed",
                    "type": kind}  # fmt: skip
        case "reasoning":
            return {**own, **_reasoning(item, field), "type": kind}
        case "item_reference":
            return {"id": string_in(item, "id", field), "type": kind}
        case _ if kind == _MCP_TOOLS:
            return {**item, **own, **_listed(item, field)}
    known = (
        f"message, reasoning, item_reference, {_MCP_TOOLS}, and function_call and custom_tool_call with their outputs"
    )
    raise InvalidRequest(f"{field}.type: items of type {kind!r} are not supported, only {known}", param=f"{field}.type")


def _listed(item: Item, field: str) -> Item:
    """Check the fields of a list of MCP tools, which its readers expect."""
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise InvalidRequest(f"{field}.tools must be a list of objects", param=f"{field}.tools")
    return {"server_label": string_in(item, "server_label", field), "tools": tools}


def _message(item: Item, field: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in (*_INPUT_ROLES, "assistant"):
        roles = ", ".join((*_INPUT_ROLES, "assistant"))
        raise InvalidRequest(f"{field}.role must be one of {roles}; got {role!r}", param=f"{field}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    return {
        "role": role,
        "content": _parts(content, f"{field}.content", kind, media=_OF_USERS if role == "user" else {}),
    }


def _reasoning(item: Item, field: str) -> Item:
    """Normalise a reasoning item; encrypted content comes from other servers and is dropped."""
    shown: Item = {"summary": _texts(item.get("summary") or [], f"{field}.summary", "summary_text")}
    if item.get("content"):
        shown["content"] = _texts(item["content"], f"{field}.content", "reasoning_text")
    return shown


def _texts(parts: Any, field: str, kind: str) -> list[Item]:
    if not isinstance(parts, list):
        raise InvalidRequest(f"{field} must be a list of parts", param=field)
    for place, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}[{place}] must be an object with text", param=f"{field}[{place}]")
    return [{"type": kind, "text": part["text"]} for part in parts]


def _parts(content: Any, field: str, kind: str, *, media: Mapping[Any, Callable[[Item, str], Item]]) -> list[Item]:
    """Normalise text parts to the type that messages of this kind use, and media by their types."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{field} must be a string or a list of parts", param=field)
    return [
        media[part["type"]](part, f"{field}[{place}]")
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in media
        else _part(part, f"{field}[{place}]", kind)
        for place, part in enumerate(content)
    ]


class _Medium(dict[str, Any]):
    """Image or audio in normal form; `field` is where the request has it, unknown for those of stored responses."""

    field = ""


def _image(part: Item, field: str) -> Item:
    if part.get("file_id") is not None and part.get("image_url") is None:
        at = f"{field}.file_id"
        raise InvalidRequest(f"{at} is not supported: send the image as image_url", param=at)
    check_detail(part.get("detail"), f"{field}.detail")
    url = string_in(part, "image_url", field)
    image = _Medium(type="input_image", image_url=url, detail=part.get("detail") or "auto")
    image.field = f"{field}.image_url"
    return image


def _audio(part: Item, field: str) -> Item:
    field = f"{field}.input_audio"
    given = part.get("input_audio")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{field} must be an object with data and format", param=field)
    audio_url(given, field)  # checks it
    audio = _Medium(type="input_audio", input_audio={name: given[name] for name in ("data", "format")})
    audio.field = f"{field}.data"
    return audio


_OF_TOOLS: Mapping[Any, Callable[[Item, str], Item]] = {"input_image": _image}
"""Readers of the media that results of tools may have, by type."""
_OF_USERS = {**_OF_TOOLS, "input_audio": _audio}
"""Readers of the media that users' messages may have, by type."""


def _part(part: Any, field: str, kind: str) -> Item:
    given = part.get("type") if isinstance(part, dict) else None
    name = _TEXTS.get(given) if isinstance(given, str) else None
    if name is None:
        raise InvalidRequest(f"{field}: content parts of type {given!r} are not supported here", param=field)
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{name} must be a string", param=f"{field}.{name}")
    if name == "refusal" and kind == "output_text":
        return {"type": "refusal", "refusal": text}
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}
