"""SpeechOptions: options of a transcription, checked and parsed from the fields of the OpenAI API's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.speech.languages import LANGUAGES
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.speech import SpeechRequest

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried in order while the text of a window looks wrong, unless the client gives one."""
GRANULARITIES = "timestamp_granularities[]"


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """What a client asks for. language: code; empty: detect it. words: with times of words; segments: of segments."""

    translate: bool
    language: str
    prompt: str
    temperatures: tuple[float, ...]
    format: str
    stream: bool
    words: bool
    segments: bool

    @classmethod
    def of(cls, request: SpeechRequest, languages: Sequence[str]) -> SpeechOptions:
        """Return the options of a request for a model of these languages. Raises InvalidRequest naming the field."""
        fields = dict(request.fields)
        granularities = {value for name, value in request.fields if name == GRANULARITIES}
        form, stream = fields.get("response_format", "json"), fields.get("stream") == "true"
        if form not in FORMATS:
            raise InvalidRequest(f"response_format must be one of {', '.join(FORMATS)}", param="response_format")
        if granularities and form != "verbose_json":
            raise InvalidRequest(f"{GRANULARITIES} needs response_format verbose_json", param=GRANULARITIES)
        if stream and form not in ("json", "text"):
            raise InvalidRequest("stream needs response_format json or text", param="stream")
        if request.translate and not languages:
            raise InvalidRequest("the model supports only English and does not translate", param="model")
        given = float(fields.get("temperature") or 0.0)
        return cls(
            request.translate,
            _language(fields.get("language", ""), languages),
            fields.get("prompt", ""),
            (given,) if given else TEMPERATURES,
            form,
            stream,
            "word" in granularities,
            not granularities or "segment" in granularities,
        )


def _language(given: str, languages: Sequence[str]) -> str:
    """Return the code of a language that a client names by its code or in English."""
    plain = given.strip().lower()
    code = next((code for code, name in LANGUAGES.items() if name == plain), plain)
    if code and code not in (languages or ("en",)):
        raise InvalidRequest(
            f"language {given[:32]!r} is not one of the model's: use a code such as en", param="language"
        )
    return code if languages else "en"
