"""Messages of a transcription: a router's request with audio, and the parts of a node's answer."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(67, checked=True)
@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Router → node, `POST /attempts/transcribe`. Answered by SpeechParts.

    translate   into English, instead of the language that is spoken
    fields      names and values of the OpenAI API's form, besides file and model
    filename    name of the audio file; engines may infer the format from it
    deadline_s  seconds left for the request when the message was sent
    """

    translate: bool
    fields: tuple[tuple[str, str], ...]
    filename: str
    audio: bytes
    deadline_s: float = 600.0


@message(68, checked=True)
@dataclass(frozen=True, slots=True)
class SpeechPart:
    """Node → router: the next bytes of an engine's answer. content_type: of the whole answer, with its first part."""

    data: bytes
    content_type: str = ""
