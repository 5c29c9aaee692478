"""Rendering of chats with media into prompts by the model's own processor, on low-priority threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pydantic_core import from_json

from kvferry.engine.media.encoder import MediaEncoder
from kvferry.protocol.errors import InvalidRequest, Overloaded
from kvferry.protocol.media import MODALITIES, RenderedPrompt, RenderRequest
from kvferry.protocol.speech import SpeechRequest
from kvferry.runtime.limits import available_cores
from kvferry.runtime.thread_priority import lower_priority

CORES_PER_THREAD, MAX_THREADS = 8, 4
"""CPU cores per thread, and maximum number of threads. Decoding and scaling of images partly releases the GIL."""
MAX_WAITING = 64
"""Maximum number of chats that wait or are being rendered; further ones are refused."""
NICENESS = 10
"""Niceness of the threads: a busy engine thread on the same core gets nine tenths of its time."""


class MediaRenderer:
    """Implements `worker.media_engine.MediaEngine` with a model's own processor. Belongs to one asyncio loop.

    limits: maximum number of items in a prompt by modality. rendered: called after each prompt."""

    def __init__(self, encoder: MediaEncoder, limits: Mapping[str, int], rendered: Callable[[], None]) -> None:
        self._encoder, self._limits, self._rendered = encoder, limits, rendered
        threads = min(MAX_THREADS, max(1, available_cores() // CORES_PER_THREAD))
        self._threads = ThreadPoolExecutor(threads, "media-render", lower_priority, (NICENESS,))
        self._waiting = 0

    async def render(self, request: RenderRequest, adapter: str = "") -> RenderedPrompt:
        """Return a chat's prompt; adapters do not change it. See `MediaEngine`.

        Raises InvalidRequest naming the field, and Overloaded."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} chats with media wait on this node", retry_after=1.0)
        self._waiting += 1
        try:
            prompt = await asyncio.get_running_loop().run_in_executor(self._threads, self._render, request)
        finally:
            self._waiting -= 1
        self._rendered()
        return prompt

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Raise InvalidRequest: the model does not transcribe."""
        raise InvalidRequest("this model does not transcribe audio", param="model")

    def stop(self) -> None:
        """End the threads after the chats that they are rendering."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _render(self, request: RenderRequest) -> RenderedPrompt:
        self._check(request.chat)
        prompt = self._encoder.render(request)
        positions = self._encoder.rope_positions(prompt.token_ids, prompt.media)
        if positions is None:
            return prompt
        return replace(prompt, rope_offset=int(positions.max()) + 1 - len(prompt.token_ids))

    def _check(self, chat: bytes) -> None:
        """Raise InvalidRequest if a chat has more media than the limits allow."""
        counts = Counter[str]()
        for message in from_json(chat)["messages"]:
            content = message.get("content")
            kinds = (
                [str(part.get("type")).removesuffix("_url") for part in content] if isinstance(content, list) else ()
            )
            counts.update(kind for kind in kinds if kind in MODALITIES)
        for kind, count in counts.items():
            if count > (most := self._limits.get(kind, count)):
                raise InvalidRequest(f"a prompt may hold at most {most} {kind}s, got {count}", param="messages")
