"""Transcription request as JSON, with the audio as base64: the form of Open WebUI and OpenRouter."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from kvferry.router.api.audio.body import SpeechBody
from kvferry.router.api.audio.form import Form
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.long_work import LongWork
from kvferry.router.media.base64_text import decoded_slices
from kvferry.router.media.refusal import refused

AUDIO = "input_audio"
_DATA = f"{AUDIO}.data"


class InputAudio(BaseModel):
    """Base64 of an audio file, and the ending of its name; the file's first bytes show its format."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(max_length=32, pattern=r"^\w*$")] = ""


class SpeechJson(SpeechBody):
    """JSON body of POST /v1/audio/transcriptions and /v1/audio/translations; empty fields count as missing."""

    timestamp_granularities: list[Literal["word", "segment"]] = Field(default=[], max_length=2)
    input_audio: InputAudio

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None and each != ""}


def is_json(data: bytes) -> bool:
    """Return whether a body is JSON rather than a multipart form."""
    return data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


async def read_json(data: bytes) -> tuple[Form, SpeechJson]:
    """Return the file of a JSON body as a form's, and the fields; raise InvalidRequest naming the field."""
    body = await parsed(SpeechJson, data)
    del data  # the body holds the base64
    audio, work = BytesIO(), LongWork()
    try:
        for piece in decoded_slices(body.input_audio.data):
            audio.write(piece)
            await work.pause()
    except ValueError:
        raise refused(_DATA, "is not valid base64: it is cut off, or has other characters") from None
    body.input_audio.data = ""
    return Form(filename=f"audio.{body.input_audio.format or 'bin'}", file=audio.getvalue(), field=_DATA), body
