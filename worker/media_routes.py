"""HTTP routes of a node for media, called by routers: rendering of chats with images, and transcription of audio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from kvferry.protocol.errors import AdapterNotLoaded, DeadlineExceeded, Draining, InvalidRequest, StepFailed
from kvferry.protocol.media import RenderRequest, joined, with_data, without_data
from kvferry.protocol.messages import GenerateRequest, PrefillRequest
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.protocol.wire import pack
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.http import read_message, read_messages
from kvferry.worker.media_engine import MediaEngine

T = TypeVar("T")
Attempt = TypeVar("Attempt", GenerateRequest, PrefillRequest)
MSGPACK = "application/msgpack"


async def read_attempt(request: Request, kind: type[Attempt]) -> Attempt:
    """Return a message with a job, whose media data follow it in the body. Raises what `read_message` raises."""
    message, datas = await _followed(request, kind)
    if not (message.job.media or datas):
        return message
    return replace(message, job=replace(message.job, media=joined(message.job.media, datas)))


async def read_render(request: Request) -> RenderRequest:
    """Return a RenderRequest, whose files follow it in the body. Raises what `read_message` raises."""
    message, files = await _followed(request, RenderRequest)
    if not all(isinstance(file, bytes) for file in files):
        raise InvalidRequest("the files of a RenderRequest must be bytes", param="body")
    return replace(message, files=tuple(files))


async def _followed(request: Request, kind: type[T]) -> tuple[T, list[Any]]:
    """Return the first message of a body, and those after it."""
    found = await read_messages(request)
    if not found or not isinstance(found[0], kind):
        raise InvalidRequest(f"the body must be a {kind.__name__}", param="body")
    return found[0], found[1:]


class MediaRoutes:
    """Routes `POST /attempts/render` and `POST /attempts/transcribe`. running: number of requests in progress.

    adapters: returns names of LoRA adapters by their ids; None while the node takes no new work."""

    def __init__(
        self, app: FastAPI, media: MediaEngine | None, adapters: Callable[[], Mapping[str, str] | None]
    ) -> None:
        self._media, self._adapters, self.running = media, adapters, 0
        app.post("/attempts/render")(self.post_render)
        app.post("/attempts/transcribe")(self.post_transcribe)

    async def post_render(self, request: Request) -> Response:
        """Answer with the RenderedPrompt of a RenderRequest; a disconnect of the caller cancels the work."""
        render_request, (engine, names) = await read_render(request), self._ready()
        if render_request.adapter and render_request.adapter not in names:
            raise AdapterNotLoaded("the engine has no LoRA adapter with this id")
        made = engine.render(render_request, names.get(render_request.adapter, ""))
        prompt = await self._in_time(request, made, render_request.deadline_s)
        known = bool(render_request.files) and [item.file for item in prompt.media] == [*render_request.files]
        items = [replace(item, file=b"") for item in prompt.media] if known else prompt.media
        message = pack(replace(prompt, media=without_data(items), needs_files=known))
        return Response(b"".join(with_data(message, items)), media_type=MSGPACK)

    async def post_transcribe(self, request: Request) -> Response:
        """Answer with SpeechParts. An error before the first part has a status; a later one cuts the answer off."""
        speech_request, (engine, _) = await read_message(request, SpeechRequest), self._ready()
        parts = _parts(engine, speech_request)
        try:
            first = await self._in_time(request, anext(parts), speech_request.deadline_s)
        except StopAsyncIteration:
            raise StepFailed("the engine's answer is empty") from None
        except BaseException:
            await parts.aclose()
            raise
        return StreamingResponse(self._followed(first, parts), media_type=MSGPACK)

    def _ready(self) -> tuple[MediaEngine, Mapping[str, str]]:
        """Return the engine and the names of its adapters. Raises InvalidRequest and Draining."""
        if self._media is None:
            raise InvalidRequest("this model's engine takes no images, audio or video")
        if (names := self._adapters()) is None:
            raise Draining("this node takes no new work")
        return self._media, names

    async def _in_time(self, request: Request, work: Awaitable[T], limit_s: float) -> T:
        self.running += 1
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                return await until_disconnect(request.receive, work)
        except TimeoutError:
            raise DeadlineExceeded(f"not finished after {limit_s:.3g} s") from None
        finally:
            self.running -= 1

    async def _followed(self, first: SpeechPart, parts: AsyncGenerator[SpeechPart]) -> AsyncGenerator[bytes]:
        self.running += 1
        try:
            yield pack(first)
            async with aclosing(parts):
                async for part in parts:
                    yield pack(part)
        finally:
            self.running -= 1


async def _parts(media: MediaEngine, speech_request: SpeechRequest) -> AsyncGenerator[SpeechPart]:
    """Yield the engine's answer as it comes, within the request's deadline."""
    arrived: asyncio.Queue[SpeechPart | None] = asyncio.Queue()
    kind = ""

    def begun(content_type: str) -> None:
        nonlocal kind
        kind = content_type or "application/octet-stream"

    def deliver(data: bytes) -> None:
        nonlocal kind
        arrived.put_nowait(SpeechPart(data, kind))
        kind = ""

    async def work() -> None:
        try:
            async with asyncio.timeout(max(0.0, speech_request.deadline_s)):
                await media.transcribe(speech_request, begun, deliver)
        finally:
            arrived.put_nowait(None)

    task = asyncio.create_task(work())
    try:
        while (part := await arrived.get()) is not None:
            yield part
        await task
    finally:
        task.cancel()
