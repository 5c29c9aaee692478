"""Interface to an engine that reads images, audio or video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.protocol.media import RenderedPrompt
from kvferry.protocol.speech import SpeechRequest


class MediaEngine(Protocol):
    """The part of an engine's client that concerns media. Its calls raise what those of `engine.Engine` raise.

    `chat` is JSON of an object with messages, in the OpenAI API's form, and variables of the chat template."""

    async def render(self, chat: bytes, adapter: str = "") -> RenderedPrompt:
        """Return a chat's prompt. adapter: name of a LoRA adapter; empty: none."""
        ...

    async def answer(self, chat: bytes, tokens: int, cache_salt: str) -> tuple[int, ...]:
        """Return so many greedy tokens that the engine answers a chat with, asked by its OpenAI API."""
        ...

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Write down, or translate, what audio says. begun: called with the content type before the first bytes."""
        ...
