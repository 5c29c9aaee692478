"""Interface of an engine's media that is measured at join: rendering, and the tokens with which its chat answers."""

from __future__ import annotations

from typing import Protocol

from kvferry.worker.media_engine import MediaEngine


class MeasurableMedia(MediaEngine, Protocol):
    """The part of an engine's client that concerns media. Its calls raise what those of `engine.Engine` raise."""

    async def answer(self, chat: bytes, tokens: int, cache_salt: str) -> tuple[int, ...]:
        """Return `tokens` greedy tokens with which the engine's OpenAI API answers a chat."""
        ...
