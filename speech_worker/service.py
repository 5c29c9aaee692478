"""Transcription on a speech node: answers SpeechRequests, several files at a time, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvferry.engine.speech.options import SpeechOptions
from kvferry.engine.speech.segments import Segment
from kvferry.engine.speech.track import Track
from kvferry.engine.speech.transcriber import SpeechModel, Transcriber
from kvferry.engine.speech.transcript_text import Transcript, content_type, delta, done, failed, written
from kvferry.protocol.errors import InvalidRequest, KvferryError, Overloaded
from kvferry.protocol.media import RenderedPrompt, RenderRequest
from kvferry.protocol.speech import SpeechRequest
from kvferry.protocol.speech_metrics import SpeechMetrics

DECODING_THREADS = 2
"""Number of threads that decode audio files, besides the engine's."""
WAITING_FACTOR, MAX_BYTES = 4, 2**30
"""Maximum number of waiting files per transcribed one, and bytes of all files; further files are refused."""


@dataclass
class SpeechService:
    """Transcriptions of one node. Implements `worker.media_engine.MediaEngine`. It belongs to one asyncio loop.

    seats: number of files transcribed at once. max_seconds: maximum length of a file, in seconds of audio."""

    model: SpeechModel
    metrics: SpeechMetrics
    seats: int
    max_seconds: float
    waiting: int = 0
    running: int = 0
    _held: int = 0
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.seats)
        self._threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="audio")

    async def render(self, request: RenderRequest, adapter: str = "") -> RenderedPrompt:
        """Raise InvalidRequest: the model takes no chats."""
        raise InvalidRequest("this model transcribes speech; it takes no chats", param="model")

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        """Transcribe or translate speech.

        Raises InvalidRequest naming the field, and Overloaded if too many files wait."""
        options = SpeechOptions.of(request, [code for code, _ in self.model.config.tokens.languages])
        size = len(request.audio)
        if self.waiting >= WAITING_FACTOR * self.seats or self._held + size > MAX_BYTES:
            raise Overloaded(f"{self.waiting} audio files wait for this node")
        self._held += size
        try:
            async with self._seat():
                await self._transcribe(request.audio, options, begun, deliver)
        finally:
            self._held -= size

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[None]:
        """Wait until a file may be transcribed, and count it as running during the `with` block."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()

    async def _transcribe(
        self, audio: bytes, options: SpeechOptions, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        track = Track(audio, self.max_seconds, self._threads)
        transcriber, found = Transcriber(self.model, track, options), list[Segment]()
        try:
            async for segment in transcriber.segments():
                if options.stream:
                    if not found:
                        begun(content_type(options))
                    deliver(delta(segment.text if found else segment.text.lstrip()))
                found.append(segment)
            transcript = Transcript(found, transcriber.language or "en", track.duration)
            if not (options.stream and found):
                begun(content_type(options))
            deliver(done(transcript) if options.stream else written(transcript, options))
        except KvferryError as error:
            if not (options.stream and found):
                raise
            deliver(failed(error))
        finally:
            self._count(transcriber, track.duration)
            await track.close()

    def _count(self, transcriber: Transcriber, seconds: float) -> None:
        self.metrics.audio_seconds.inc(seconds)
        self.metrics.windows.inc(transcriber.windows)
        self.metrics.fallbacks.inc(transcriber.fallbacks)
        self.metrics.silent_seconds.inc(transcriber.skipped / 100)

    def close(self) -> None:
        """End the threads that decode files."""
        self._threads.shutdown(wait=False, cancel_futures=True)
