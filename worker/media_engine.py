"""Interface of an engine that renders prompts with media and transcribes audio: a node's own, or another server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.protocol.media import RenderedPrompt
from kvferry.protocol.speech import SpeechRequest


class MediaEngine(Protocol):
    """Engine that a node's media routes call: the node's own, or the client of another server.

    `chat` is a JSON object with messages, in the OpenAI API's form, and variables of the chat template."""

    async def render(self, chat: bytes, adapter: str = "", template: str = "") -> RenderedPrompt:
        """Return a chat's prompt. adapter: name of a LoRA adapter; empty: none.

        template: chat template to use instead of the model's; empty: the model's."""
        ...

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Transcribe or translate speech. begun: called with the content type before the first bytes."""
        ...
