"""Chat templates: the Jinja dialect that models ship their prompts in, sandboxed, as transformers defines it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError, InvalidRequest

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))
_PROBE = "kvferry-probe"

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Messages to prompt text. `special_tokens` (bos_token, eos_token, ...) are visible to the template.

    `tool_use` is rendered instead of `source` when a request brings tools, for models that ship both.
    Raises ConfigError when the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_use = environment.from_string(tool_use) if tool_use is not None else self._template
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: {error}", param="chat_template") from error
        self._special_tokens = dict(special_tokens)
        self._wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

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
        extra = extra or {}
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise InvalidRequest(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
        messages = [self._shaped(message, place) for place, message in enumerate(messages)]
        template = self._tool_use if tools else self._template
        try:
            text = template.render(
                **{**self._special_tokens, **extra},
                messages=messages,
                tools=tools or None,
                documents=documents or None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it can fail in any way on messages it does not expect
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        return _up_to_content(text, messages[-1]) if continue_final_message else text

    def _shaped(self, message: Message, place: int) -> dict[str, Any]:
        content = _flat(message.get("content"), f"messages[{place}].content")
        shaped = {**message, "content": [{"type": "text", "text": content}] if self._wants_parts else content}
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
        return shaped

    def _shows(self, content: Any) -> bool:
        try:
            text = self._template.render(
                **self._special_tokens, messages=[{"role": "user", "content": content}], add_generation_prompt=True
            )
        except Exception:  # as in render: this form of content does not suit the template
            return False
        return _PROBE in text and "'type'" not in text


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
