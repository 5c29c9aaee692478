"""Base of bodies whose prompt is a chat: template options, documents and tools, and their rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import Kwargs, Objects
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.tools import Tools
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel
from kvferry.router.text.thinking_variables import EFFORTS


class ChatPrompt(RequestBody):
    """Fields that define a prompt made of messages."""

    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = False
    chat_template_kwargs: Kwargs | None = None
    enable_thinking: StrictBool | None = None
    documents: Objects | None = None
    reasoning_effort: str | None = None
    tools: Tools | None = None

    def rendering(
        self, text: TextModel, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> Rendering:
        """Return what the template is to render for the messages; raise InvalidRequest."""
        return text.rendering(messages, tools=tools, **self.template_fields(text))

    def template_fields(self, text: TextModel) -> dict[str, Any]:
        """Return documents, variables and ends of the prompt for the template; raise InvalidRequest."""
        self._check_effort(text)
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        options = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        extra = {name: value for name, value in options.items() if value is not None}
        return {
            "documents": self.documents,
            "add_generation_prompt": not continues
            if self.add_generation_prompt is None
            else self.add_generation_prompt,
            "continue_final_message": continues,
            "extra": {**extra, **(self.chat_template_kwargs or {})},
        }

    def _check_effort(self, text: TextModel) -> None:
        """Raise InvalidRequest for an effort that neither clients nor the model's template know, most likely a typo."""
        effort, source = self.reasoning_effort, text.template.source if text.template else ""
        if effort is None or effort in EFFORTS or any(f"{quote}{effort}{quote}" in source for quote in "'\""):
            return
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, or a value that the model's chat template names; "
            f"got {effort!r}",
            param="reasoning_effort",
        )
