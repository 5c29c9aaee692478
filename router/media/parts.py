"""MediaPart: content parts of a chat that are images, audio or video, parsed from OpenAI's forms; their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.media.limits import MAX_MEDIA
from kvferry.router.media.refusal import refused

MODALITIES = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
"""Modality of each type of content part; other types hold no media."""
AUDIO_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg"}
"""Formats of input_audio, and their MIME types."""
DETAILS = ("auto", "low", "high", "original")
"""Values of an image's `detail`, which changes nothing: the model's processor chooses the resolution."""


class TranslatedPart(dict[str, Any]):
    """Image or audio of a request that was translated into a chat, as a content part.

    field: where the client wrote it. kind: image_url or audio_url."""

    __slots__ = ("field",)

    def __init__(self, url: str, field: str, kind: str = "image_url") -> None:
        super().__init__({"type": kind, kind: {"url": url}})
        self.field = field


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image, audio or video of a chat.

    message, place  index of its message, and of the part in the message's content
    kind            type of the content part
    url             data URL, or http(s) URL to fetch
    part, field     where the client wrote it, and its URL or data, for errors
    """

    message: int
    place: int
    kind: str
    url: str
    part: str
    field: str

    @property
    def modality(self) -> str:
        """Return image, audio or video."""
        return MODALITIES[self.kind]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaFile:
    """Content of an image, audio or video. mime: its usual MIME type, which its first bytes show."""

    part: MediaPart
    mime: str
    data: bytes


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """Return all images, audios and videos of a chat in order.

    Raises InvalidMedia naming the field of one without a URL or data, and for too many of them."""
    found: list[MediaPart] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if (kind := _kind(part)) not in MODALITIES:
                continue
            field = part.field if isinstance(part, TranslatedPart) else f"messages[{number}].content[{place}]"
            if len(found) == MAX_MEDIA:
                raise refused(field, f"is beyond the {MAX_MEDIA} images, audios and videos that a request may have")
            found.append(MediaPart(number, place, kind, *_source(kind, part, field)))
    return found


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _source(kind: str, part: Mapping[str, Any], field: str) -> tuple[str, str, str]:
    """Return a part's URL, its own field and that of the URL."""
    value = part.get(kind)
    at = f"{field}.{kind}"
    if isinstance(value, str) and kind != "input_audio":  # as clients of other servers write it
        return _text(part, kind, at), field, at
    if not isinstance(value, Mapping):
        raise refused(at, "must be an object")
    if isinstance(part, TranslatedPart):
        return _text(value, "url", field), field, field
    if kind == "input_audio":
        return audio_url(value, at), field, f"{at}.data"
    if kind == "image_url":
        check_detail(value.get("detail"), f"{at}.detail")
    return _text(value, "url", f"{at}.url"), field, f"{at}.url"


def audio_url(value: Mapping[str, Any], field: str) -> str:
    """Return the data URL of an `input_audio`; raise InvalidMedia naming its field."""
    given = value.get("format")
    if not isinstance(given, str) or given not in AUDIO_FORMATS:
        raise refused(f"{field}.format", f"must be one of {', '.join(AUDIO_FORMATS)}, got {given!r}")
    return f"data:{AUDIO_FORMATS[given]};base64,{_text(value, 'data', f'{field}.data')}"


def check_detail(detail: Any, field: str) -> None:
    """Raise InvalidMedia for an unknown `detail`; None: not given."""
    if detail is not None and detail not in DETAILS:
        raise refused(field, f"must be one of {', '.join(DETAILS)}, got {detail!r}")


def _text(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise refused(field, "must be a string that is not empty")
    return text
