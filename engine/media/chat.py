"""ChatRenderer: renders chats with media by the model's chat template, into texts and the media between them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from pydantic_core import from_json

from kvferry.model_files.chat_templates import ChatTemplates
from kvferry.model_files.template_language import environment
from kvferry.model_files.template_sandbox import Sandbox
from kvferry.protocol.errors import ConfigError, InvalidRequest, reason

_KINDS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Types of content parts that hold a medium, and the types that templates know for them."""
_VARIABLES = ("tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ChatMedium:
    """One medium of a chat. modality: image, audio or video. field: where it stands in the request, for errors."""

    modality: str
    field: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as its template writes it. texts: before, between and after the media, one more than these."""

    texts: tuple[str, ...]
    media: tuple[ChatMedium, ...]


class ChatRenderer:
    """Renders chats with a model's chat template. Thread-safe.

    templates: must have a chat template. placeholder: text that the template writes for a medium; in a message's own
    text it stays text. Raises ConfigError if the template does not compile."""

    def __init__(self, templates: ChatTemplates, placeholder: str) -> None:
        assert templates.chat is not None, "chats need a template"
        self._placeholder, self._special = placeholder, templates.special_tokens
        language = environment(Sandbox)
        try:
            self._plain = language.from_string(templates.chat)
            self._tool_use = self._plain if templates.tool_use is None else language.from_string(templates.tool_use)
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:  # jinja compiles to Python
            raise ConfigError(f"the chat template does not parse: {reason(error)}", param="model") from error
        self._takes_text = self._shows_text()
        self._other: tuple[str, ChatRenderer] | None = None

    def of(self, template: str) -> ChatRenderer:
        """Return the renderer with this template in place of the model's; empty: the model's. The last one is kept.

        Raises InvalidRequest if the template does not compile."""
        if not template:
            return self
        if (kept := self._other) is None or kept[0] != template:
            try:
                kept = template, ChatRenderer(ChatTemplates(self._special, template), self._placeholder)
            except ConfigError as error:
                raise InvalidRequest(error.message) from error
            self._other = kept
        return kept[1]

    def render(self, chat: bytes) -> RenderedChat:
        """Return the chat of a RenderRequest's JSON. Raises InvalidRequest."""
        try:
            given = from_json(chat)
            messages = given.pop("messages")
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"the chat is not a JSON object with messages: {error}", param="messages") from error
        mark = f"kvferry{uuid.uuid4().hex}"
        media: list[ChatMedium] = []
        shown = [self._message(number, message, media) for number, message in enumerate(messages)]
        variables = {name: given.get(name) for name in _VARIABLES} | (given.get("chat_template_kwargs") or {})
        variables = self._masked({**variables, "messages": shown}, mark)
        text = self._written(variables)
        if given.get("continue_final_message"):
            text = _continued(text, variables["messages"])
        texts = [part.replace(mark, self._placeholder) for part in text.split(self._placeholder)]
        if len(texts) - 1 != len(media):
            raise InvalidRequest(
                f"the chat template shows {len(texts) - 1} of {len(media)} images, audios and videos", param="messages"
            )
        return RenderedChat(tuple(texts), tuple(media))

    def _message(self, number: int, message: Mapping[str, Any], media: list[ChatMedium]) -> dict[str, Any]:
        """Return a message for the template, and add its media."""
        content, shown = message.get("content"), dict(message)
        if isinstance(content, list):
            parts = enumerate(content)
            shown["content"] = [_part(part, f"messages[{number}].content[{place}]", media) for place, part in parts]
        elif content and not self._takes_text:
            shown["content"] = [{"type": "text", "text": content}]
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_call(call) for call in calls]
        if "reasoning" in message:
            shown["reasoning_content"] = message["reasoning"]
        return shown

    def _masked(self, value: Any, mark: str) -> Any:
        """Return JSON with a mark wherever its texts hold the placeholder."""
        if isinstance(value, str):
            return value.replace(self._placeholder, mark)
        if isinstance(value, dict):
            return {self._masked(name, mark): self._masked(each, mark) for name, each in value.items()}
        return [self._masked(each, mark) for each in value] if isinstance(value, list) else value

    def _written(self, variables: Mapping[str, Any]) -> str:
        template = self._tool_use if variables.get("tools") else self._plain
        try:
            return template.render({**self._special, **variables})
        except Exception as error:  # a template is a program and can fail in any way on unexpected messages
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error

    def _shows_text(self) -> bool:
        """Return whether the template shows content that is one text; some show only lists of parts."""
        probe = {"messages": [{"role": "user", "content": "kvferry"}], "add_generation_prompt": True}
        try:
            return "kvferry" in self._written(probe)
        except InvalidRequest:
            return False


def _part(part: Mapping[str, Any], field: str, media: list[ChatMedium]) -> dict[str, Any]:
    kind = str(part.get("type"))
    if kind not in _KINDS:
        return dict(part)
    media.append(ChatMedium(_KINDS[kind], field))
    return {"type": _KINDS[kind], kind: ""}  # some templates look for the name of the URL alone


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, where they are JSON."""
    function = dict(call["function"])
    try:
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": function}


def _continued(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt up to the end of the last message's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if part.get("text")), "")
    content = (content or "").strip()
    at = text.rfind(content)
    if not content or at < 0:
        raise InvalidRequest("the last message has no content to continue", param="continue_final_message")
    return text[: at + len(content)]
