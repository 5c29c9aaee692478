"""A model as text: messages to a prompt, texts to token ids, and what its configuration says. Made once, by `load`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_files.naming import ModelName
from model_files.source import ModelFacts
from model_files.task import GENERATES, Task
from model_files.tokenizer import TextTokenizer
from protocol.errors import InvalidRequest
from router.text.template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The OpenAI API's. Models that were trained on other roles name them in their chat template."""
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextModel:
    """called: what clients call it. template: None when the model has none and none was given. Safe to use from several
    threads; encoding releases the GIL."""

    called: ModelName
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    facts: ModelFacts
    task: Task = GENERATES

    @property
    def name(self) -> str:
        return self.called.first

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens spelled out in the text are recognised either way."""
        encode = self.tokenizer.library.encode_batch_fast  # the plain `encode` keeps the GIL
        ids: list[int] = encode([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts as one, with the model's special tokens, and where the second begins."""
        found = self.tokenizer.library.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
        ids, places = found.ids, found.sequence_ids
        return ids, places.index(1) if 1 in places else len(ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `extra` are further variables (chat_template_kwargs). With continue_final_message the prompt
        ends where the last message's content ends. Raises InvalidRequest naming the field at fault."""
        template = self.template
        if template is None:
            raise InvalidRequest(
                f"the model {self.name!r} has no chat template; give the router one with --chat-template, or use "
                "/v1/completions",
                param="messages",
            )
        extra = extra or {}
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise InvalidRequest(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
        self._check_roles(messages, template.roles)
        messages = [_shaped(message, place, template.wants_parts) for place, message in enumerate(messages)]
        try:
            text = (template.tool_use if tools else template.plain).render(
                **{**template.special_tokens, **extra},
                messages=messages,
                tools=tools or None,
                documents=documents or None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it can fail in any way on messages it does not expect
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        return _up_to_content(text, messages[-1]) if continue_final_message else text

    def _check_roles(self, messages: Sequence[Message], named: frozenset[str]) -> None:
        """Only what the model can tell apart: a role that nothing names is a client's slip of the pen."""
        for place, message in enumerate(messages):
            role = message.get("role")
            if role not in ROLES and role not in named:
                allowed = ", ".join((*ROLES, *sorted(named.difference(ROLES))))
                raise InvalidRequest(
                    f"messages[{place}].role must be one of {allowed}; got {role!r}", param=f"messages[{place}].role"
                )


def _shaped(message: Message, place: int, as_parts: bool) -> dict[str, Any]:
    content = _flat(message.get("content"), f"messages[{place}].content")
    shaped = {**message, "content": [{"type": "text", "text": content}] if as_parts else content}
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return shaped


def _flat(content: Any, field: str) -> str:
    """Content as one string; text parts are joined by newlines, as other servers do."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else part.get("refusal") if kind == "refusal" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"content parts of type {kind!r} are not supported, only text", param=f"{field}[{place}]"
            )
        texts.append(text)
    return "\n".join(texts)


def _parsed_call(call: Any) -> Any:
    """Templates want a call's arguments as an object; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _up_to_content(text: str, message: Mapping[str, Any]) -> str:
    content = message["content"]
    content = (content[-1]["text"] if isinstance(content, list) else content).strip()
    at = text.rfind(content)
    if not content or at < 0:
        raise InvalidRequest("the last message has no content to continue", param="continue_final_message")
    return text[: at + len(content)]
