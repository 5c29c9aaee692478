"""Interface to an engine that reads images, audio or video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.protocol.media import RenderedPrompt
from kvferry.protocol.speech import SpeechRequest


class MediaEngine(Protocol):
    """What a node's routes for media need: the engine of an own node, or the client of another server.

    `chat` is JSON of an object with messages, in the OpenAI API's form, and variables of the chat template."""

    async def render(self, chat: bytes, adapter: str = "", template: str = "") -> RenderedPrompt:
        """Return a chat's prompt. adapter: name of a LoRA adapter; empty: none.

        template: chat template in place of the model's own; empty: the model's."""
        ...

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Write down, or translate, what audio says. begun: called with the content type before the first bytes."""
        ...
