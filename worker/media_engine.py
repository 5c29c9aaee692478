"""Interface of an engine that renders prompts with media and transcribes audio: a node's own, or another server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.protocol.media import RenderedPrompt, RenderRequest
from kvferry.protocol.speech import SpeechRequest


class MediaEngine(Protocol):
    """Engine that a node's media routes call: the node's own, or the client of another server."""

    async def render(self, request: RenderRequest, adapter: str = "") -> RenderedPrompt:
        """Return a chat's prompt. adapter: name of the request's LoRA adapter; empty: none."""
        ...

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Transcribe or translate speech. begun: called with the content type before the first bytes."""
        ...
