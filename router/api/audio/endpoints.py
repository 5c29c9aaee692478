"""Routes that transcribe or translate audio: check the file, send it to a node, and pass on the node's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvferry.protocol.errors import DeadlineExceeded, InvalidRequest, KvferryError
from kvferry.protocol.media import TRANSCRIPTION
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.router.api.admission import AdmittedRequest, TokenUsage
from kvferry.router.api.answers import ErrorAnswer
from kvferry.router.api.audio.body import SpeechBody, speech_body
from kvferry.router.api.audio.form import Form, read_form
from kvferry.router.api.audio.json_body import AUDIO, DATA, InputAudio, SpeechJson, is_json, read_json
from kvferry.router.api.http_errors import error_body
from kvferry.router.api.inference_route import InferenceRoute
from kvferry.router.api.responder import Responder
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import dump
from kvferry.router.media.data_urls import decoded_base64
from kvferry.router.media.formats import SPEECH, format_of, wav_fault
from kvferry.router.tenants.scheduler_slots import Size

EVENTS = "text/event-stream"
TYPES = ("application/json", "text/plain")
"""Content types of whole answers that are passed on as they are; any other type becomes octet-stream."""
BYTES_PER_TOKEN, OUTPUT_TOKENS = 640, 448
"""Bytes of audio that count as a token of the tenant's limits: 20 ms of speech at 16 kHz; and its expected output."""


class TranscriptionAnswer(BaseModel):
    """What was said; further fields are the engine's."""

    model_config = ConfigDict(extra="allow")

    text: str


@dataclass(frozen=True, slots=True)
class SpeechEndpoint:
    """An endpoint of audio. translate: into English."""

    path: str
    summary: str
    translate: bool
    answer: type[BaseModel] = TranscriptionAnswer
    error: type[BaseModel] = ErrorAnswer

    @property
    def takes(self) -> dict[str, Any]:
        """Return the `openapi_extra` of the route: its form, and the same as JSON."""
        file, audio = {"type": "string", "format": "binary"}, InputAudio.model_json_schema()
        content = {
            "multipart/form-data": _schema("file", file, SpeechBody.model_json_schema(by_alias=True)),
            "application/json": _schema(AUDIO, audio, SpeechJson.model_json_schema()),
        }
        return {"requestBody": {"required": True, "content": content}}


def _schema(name: str, audio: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a body whose audio is in the field `name`."""
    return {"schema": {"type": "object", "required": [name], "properties": {**body["properties"], name: audio}}}


SPEECH_ENDPOINTS = (
    SpeechEndpoint("/v1/audio/transcriptions", "Transcribe audio", False),
    SpeechEndpoint("/v1/audio/translations", "Translate audio into English", True),
)
"""All endpoints of audio."""


class SpeechRoute(InferenceRoute[SpeechEndpoint]):
    """Route of an endpoint of audio."""

    async def _work(self, admitted: AdmittedRequest, data: bytes, responder: Responder) -> SpeechAnswer:
        held = [data]
        del data  # it is freed once it is read
        form, body, pool = await self._read(held, admitted.call.tenant)
        request = self._request(form, body, admitted.call.deadline - time.monotonic())
        tokens = max(1, len(request.audio) // BYTES_PER_TOKEN)
        await admitted.turn(pool.turns, Size(1, tokens, OUTPUT_TOKENS))
        answer = SpeechAnswer(responder, self._path)
        try:
            async with asyncio.timeout(request.deadline_s):
                await answer.follow(pool, request, lambda: admitted.began(lambda: TokenUsage(tokens)))
        except TimeoutError:
            raise DeadlineExceeded(f"not finished after {request.deadline_s:.3g} s") from None
        return answer

    async def _read(self, held: list[bytes], tenant: str) -> tuple[Form, SpeechBody, ServedModel]:
        """Return the file and the fields of a form or JSON body, and their model; `held` alone refers to the body.

        Base64 and file count as held before decoding, which may wait for other requests. Raises InvalidRequest naming
        the field; Overloaded."""
        if not is_json(held[0]):
            form = await read_form(held.pop())
            fields = speech_body(form)
            pool = self._pool(fields)
            _hold(pool, tenant, form, len(form.file or b""))
            return form, fields, pool
        body = await read_json(held)
        pool, audio = self._pool(body), body.take_audio()
        form = Form(filename=audio.filename, field=DATA)
        _hold(pool, tenant, audio, len(audio.data))
        _hold(pool, tenant, form, audio.size)
        form.file = await decoded_base64(audio.data, DATA)
        return form, body, pool

    def _pool(self, body: SpeechBody) -> ServedModel:
        """Return the model that a body names; raise InvalidRequest if it does not transcribe."""
        pool = self._pools.pool(body.model)
        try:
            pool.cluster.media.check((TRANSCRIPTION,))
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._path} is not supported: {error.message}", param="model") from error
        return pool

    def _request(self, form: Form, body: SpeechBody, left_s: float) -> SpeechRequest:
        """Return the request for a node; raise InvalidRequest naming the field."""
        if not form.file:
            raise InvalidRequest(f"{form.field} must be an audio file that is not empty", param=form.field)
        found = format_of(form.file)
        if found not in SPEECH:
            raise InvalidRequest(f"{form.field} must be WAV, MP3, FLAC, Ogg, MP4 or WebM", param=form.field)
        if found == "audio/wav" and (fault := wav_fault(form.file)):
            raise InvalidRequest(f"{form.field} is not a usable WAV file: {fault}", param=form.field)
        return SpeechRequest(self.endpoint.translate, body.fields(), form.filename, form.file, max(0.0, left_s))


def _hold(pool: ServedModel, tenant: str, holder: object, size: int) -> None:
    """Count bytes of audio until `holder` is garbage-collected; raise Overloaded."""
    if pool.media is not None:
        pool.media.budget.hold(tenant, holder, size)


class SpeechAnswer:
    """Passes a node's answer on to the client: events as they come, anything else as a whole."""

    def __init__(self, responder: Responder, path: str) -> None:
        self._responder, self._path = responder, path
        self._kind, self._parts = "", list[bytes]()

    async def follow(self, pool: ServedModel, request: SpeechRequest, began: Any) -> None:
        """Send the request to a node and pass on its stream; `began` is called at its first bytes."""
        arrived: asyncio.Queue[SpeechPart | None] = asyncio.Queue()

        async def ask() -> None:
            try:
                await pool.cluster.media.transcribe(request, arrived.put_nowait)
            finally:
                arrived.put_nowait(None)

        task = asyncio.create_task(ask())
        try:
            while (part := await arrived.get()) is not None:
                if not self._kind:
                    began()
                    self._kind = part.content_type
                    if self._streams:
                        await self._responder.begin_stream({}, self._failing)
                if self._streams:
                    await self._responder.write(part.data)
                else:
                    self._parts.append(part.data)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def finish(self, responder: Responder) -> None:
        """Send the end of the stream, or the whole answer."""
        if self._streams:
            await responder.write(b"", more=False)
            return
        plain = self._kind.partition(";")[0].strip().lower()
        kind = self._kind if plain in TYPES else "application/octet-stream"
        await responder.content(kind, b"".join(self._parts), _NO_SNIFFING)

    @property
    def _streams(self) -> bool:
        return self._kind.startswith(EVENTS)

    def _failing(self, error: KvferryError) -> bytes:
        return b"data: " + dump(error_body(error, self._path)) + b"\n\n"


_NO_SNIFFING: Mapping[str, str] = {"x-content-type-options": "nosniff"}
