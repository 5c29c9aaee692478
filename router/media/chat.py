"""MediaChat: a chat with media, and the JSON of it that is sent to the engine that makes its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import to_json

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.media.parts import MODALITIES, MediaFile, MediaPart, media_parts
from kvferry.router.text.message_shaping import MAX_PARTS
from kvferry.router.text.text_model import TextModel

_TEXTS = ("name", "tool_call_id", "reasoning")
"""Fields of a message that are texts."""
_TEXT_PARTS = ("text", "refusal")
"""Types of content parts that are texts, in fields of the same names."""
_KEPT = frozenset(("chat_template", "tokenize"))
"""Names that an engine would not treat as template variables."""


@dataclass(frozen=True, slots=True)
class MediaChat:
    """A chat with media.

    messages   in the API's form
    parts      its media
    variables  tools, documents and variables of the chat template
    """

    messages: Sequence[Mapping[str, Any]]
    parts: Sequence[MediaPart]
    variables: Mapping[str, Any]

    @property
    def modalities(self) -> frozenset[str]:
        """Return the modalities of its media."""
        return frozenset(part.modality for part in self.parts)

    @property
    def size(self) -> int:
        """Return the characters of its media's URLs, which hold the media's bytes or name them."""
        return sum(len(part.url) for part in self.parts)

    @property
    def words(self) -> str:
        """Return all texts that the prompt may hold, whatever the template makes of them."""
        found = [to_json(self.variables).decode()]
        for message in self.messages:
            content = message.get("content")
            found += [content] if isinstance(content, str) else [_text(part) for part in content or ()]
            found.append(to_json(message.get("tool_calls") or "").decode())
        return "\n".join(found)

    def body(self, files: Sequence[MediaFile]) -> bytes:
        """Return the JSON for an engine. files: of its media, whose data the JSON leaves out; see RenderRequest."""
        places = {(file.part.message, file.part.place): file for file in files}
        shown = [_message(number, message, places) for number, message in enumerate(self.messages)]
        try:
            return to_json({"messages": shown, **self.variables})
        except ValueError as error:
            raise InvalidRequest(f"messages cannot be written as JSON: {error}", param="messages") from error


class MediaBody(Protocol):
    """Body whose chat has media.

    prompt_field: the field that holds the chat, for errors."""

    @property
    def prompt_field(self) -> str: ...

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error with the chat's field replaced by its name in the client's API."""
        ...


def chat_of(
    text: TextModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    extra: Mapping[str, Any],
) -> MediaChat:
    """Return the chat for an engine. extra: variables of the template. Raises InvalidRequest naming the field."""
    text.check(messages, extra)
    if kept := sorted(_KEPT & extra.keys()):
        raise InvalidRequest(f"chat_template_kwargs must not set {kept[0]}", param="chat_template_kwargs")
    if tools and not text.shows_tools:
        raise InvalidRequest("tools beside media need a chat template that shows tools", param="tools")
    for number, message in enumerate(messages):
        _check_content(message.get("content"), f"messages[{number}].content")
    parts = media_parts(messages)
    variables = {
        "tools": tools or None,
        "documents": documents or None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": dict(extra) or None,
    }
    return MediaChat(messages, parts, {name: value for name, value in variables.items() if value is not None})


def _message(number: int, message: Mapping[str, Any], places: Mapping[tuple[int, int], MediaFile]) -> dict[str, Any]:
    content = message.get("content")
    shown: dict[str, Any] = {"role": message["role"], "content": content}
    if isinstance(content, list):
        shown["content"] = [_part(part, places.get((number, place))) for place, part in enumerate(content)]
    given = {**message, "reasoning": message.get("reasoning") or message.get("reasoning_content")}
    shown |= {name: given[name] for name in _TEXTS if isinstance(given.get(name), str)}
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        shown["tool_calls"] = [_call(call, f"messages[{number}].tool_calls[{at}]") for at, call in enumerate(calls)]
    return shown


def _part(part: Any, file: MediaFile | None) -> dict[str, Any]:
    """Return a content part for an engine: a medium without its data if its file is given, else a text."""
    if file is None:
        return {"type": "text", "text": _text(part)}
    name = f"{file.part.modality}_url"
    return {"type": name, name: {"url": f"data:{file.mime};base64,"}}


def _text(part: Any) -> str:
    """Return the text of a content part; empty for a medium."""
    return str(part.get(part["type"], "")) if part["type"] in _TEXT_PARTS else ""


def _check_content(content: Any, field: str) -> None:
    """Raise InvalidRequest for content parts that are neither text nor media."""
    if not isinstance(content, list):
        return
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{field} must have at most {MAX_PARTS} parts, got {len(content)}", param=field)
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in (*_TEXT_PARTS, *MODALITIES):
            at = f"{field}[{place}]"
            raise InvalidRequest(f"{at}: content parts of type {kind!r} are not supported", param=at)
        if kind in _TEXT_PARTS and not isinstance(part.get(kind), str):
            at = f"{field}[{place}].{kind}"
            raise InvalidRequest(f"{at} must be a string", param=at)


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    texts = [function.get(name) for name in ("name", "arguments")] if isinstance(function, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{field} must have a function with name and arguments", param=field)
    return {"id": str(call.get("id", "")), "type": "function", "function": dict(zip(("name", "arguments"), texts,
            strict=True))}  # fmt: skip
