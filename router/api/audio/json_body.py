"""Transcription request as JSON, with the audio as base64: the form of Open WebUI and OpenRouter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, model_validator

from kvferry.router.api.audio.body import GRANULARITIES, SpeechBody
from kvferry.router.api.bodies.reader import parsed

AUDIO = "input_audio"
DATA = f"{AUDIO}.data"


class InputAudio(BaseModel):
    """Base64 of an audio file, and the ending of its name; the file's first bytes show its format."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(max_length=32, pattern=r"^\w*$")] = ""

    @property
    def filename(self) -> str:
        """Return a name for the file, as forms have one."""
        return f"audio.{self.format or 'bin'}"

    @property
    def size(self) -> int:
        """Return the bytes of the file, up to two more."""
        return len(self.data) * 3 // 4


def _without_empty_fields(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None and each != ""}


class SpeechJson(SpeechBody):
    """JSON body of POST /v1/audio/transcriptions and /v1/audio/translations; empty fields and nulls count as missing.

    The times to return may be named as in forms."""

    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default=[], validation_alias=AliasChoices("timestamp_granularities", GRANULARITIES), max_length=2
    )
    input_audio: Annotated[InputAudio, BeforeValidator(_without_empty_fields)]

    @model_validator(mode="before")
    @classmethod
    def _given_fields(cls, value: Any) -> Any:
        return _without_empty_fields(value)

    def take_audio(self) -> InputAudio:
        """Return the audio, which this body no longer refers to, so that its memory can be freed."""
        audio = self.input_audio
        del self.input_audio
        return audio


def is_json(data: bytes) -> bool:
    """Return whether a body is JSON rather than a multipart form."""
    return data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


async def read_json(held: list[bytes]) -> SpeechJson:
    """Return the fields of the body that `held` alone refers to, which is freed; raise InvalidRequest naming one."""
    return await parsed(SpeechJson, held.pop())
