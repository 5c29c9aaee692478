"""Form fields of a transcription or translation request (except the file), and their form for the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.audio.form import Form
from kvferry.router.api.bodies.reader import build
from kvferry.router.api.bodies.request_body import RequestBody

GRANULARITIES, INCLUDE = "timestamp_granularities[]", "include[]"
"""Fields of a form that may be given several times, also without the brackets."""


class SpeechBody(RequestBody):
    """Form of POST /v1/audio/transcriptions and /v1/audio/translations, without its file; forms hold text alone."""

    language: Annotated[str, Field(max_length=32)] | None = None
    prompt: Annotated[str, Field(max_length=16_384)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default=[], alias="timestamp_granularities[]", max_length=2
    )
    include: list[str] = Field(default=[], validation_alias=AliasChoices(INCLUDE, "include"), max_length=8)
    stream: bool = False
    stream_include_usage: bool = False

    def check(self) -> None:
        """Raise InvalidRequest for what no engine of ours returns."""
        if self.include:
            raise InvalidRequest("include: log-probabilities of transcriptions are not supported", param="include")

    def fields(self) -> tuple[tuple[str, str], ...]:
        """Return names and values of the form for an engine."""
        shown: dict[str, Any] = {
            "language": self.language,
            "prompt": self.prompt,
            "response_format": self.response_format,
            "temperature": self.temperature,
            "stream": "true" if self.stream else None,
            "stream_include_usage": "true" if self.stream_include_usage else None,
        }
        pairs = [(name, str(value)) for name, value in shown.items() if value is not None]
        return (*pairs, *((GRANULARITIES, each) for each in self.timestamp_granularities))


def speech_body(form: Form) -> SpeechBody:
    """Return the fields of a form; raise InvalidRequest naming the first wrong one."""
    given: dict[str, Any] = {}
    for name, values in form.fields.items():
        if (several := f"{name.removesuffix('[]')}[]") in (GRANULARITIES, INCLUDE):
            given.setdefault(several, []).extend(values)
        elif len(values) > 1:
            raise InvalidRequest(f"{name[:64]} must be given once", param=name[:64])
        else:
            given[name] = values[0]
    return build(SpeechBody, {name: value for name, value in given.items() if value != ""})
