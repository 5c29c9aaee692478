"""Content parts of a chat that are images, audio or video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.media.limits import MAX_MEDIA

MODALITIES = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
"""Modality of each type of content part; other types hold no media."""
AUDIO_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg"}
"""Formats of input_audio, and their MIME types."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image, audio or video of a chat.

    message, place  index of its message, and of the part in the message's content
    kind            type of the content part
    url             data URL, or http(s) URL to fetch
    field           where the client wrote it, for errors
    """

    message: int
    place: int
    kind: str
    url: str
    field: str

    @property
    def modality(self) -> str:
        """Return image, audio or video."""
        return MODALITIES[self.kind]


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """Return all images, audios and videos of a chat in order.

    Raises InvalidRequest naming the field of one without a URL or data, and for too many of them."""
    found: list[MediaPart] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if (kind := _kind(part)) not in MODALITIES:
                continue
            field = f"messages[{number}].content[{place}]"
            if len(found) == MAX_MEDIA:
                raise InvalidRequest(
                    f"{field}: a request may have at most {MAX_MEDIA} images, audios and videos", param=field
                )
            found.append(_part(number, place, kind, part, field))
    return found


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _part(message: int, place: int, kind: str, part: Mapping[str, Any], field: str) -> MediaPart:
    value = part.get(kind)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field}.{kind} must be an object", param=f"{field}.{kind}")
    if kind != "input_audio":
        return MediaPart(message, place, kind, _text(value, "url", f"{field}.{kind}"), f"{field}.{kind}.url")
    given = value.get("format")
    if not isinstance(given, str) or given not in AUDIO_FORMATS:
        raise InvalidRequest(
            f"{field}.{kind}.format must be {' or '.join(AUDIO_FORMATS)}, got {given!r}", param=f"{field}.{kind}.format"
        )
    url = f"data:{AUDIO_FORMATS[given]};base64,{_text(value, 'data', f'{field}.{kind}')}"
    return MediaPart(message, place, kind, url, f"{field}.{kind}.data")


def _text(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{field}.{name} must be a string that is not empty", param=f"{field}.{name}")
    return text
