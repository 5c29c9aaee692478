"""Interface to media of another server's engine, which is measured against its own chat when it joins."""

from __future__ import annotations

from typing import Protocol

from kvferry.worker.media_engine import MediaEngine


class MeasurableMedia(MediaEngine, Protocol):
    """The part of an engine's client that concerns media. Its calls raise what those of `engine.Engine` raise."""

    async def answer(self, chat: bytes, tokens: int, cache_salt: str) -> tuple[int, ...]:
        """Return so many greedy tokens that the engine answers a chat with, asked by its OpenAI API."""
        ...
