"""Formats of a transcript: JSON, plain text, SubRip, WebVTT, and the server-sent events of a stream."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.engine.speech.languages import LANGUAGES
from kvferry.engine.speech.options import SpeechOptions
from kvferry.engine.speech.segments import Segment
from kvferry.protocol.errors import KvferryError

EVENTS = "text/event-stream"
_TYPES = {"json": "application/json", "verbose_json": "application/json"}


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole transcript. duration: of the audio in seconds. language: code of the language that is spoken."""

    segments: Sequence[Segment]
    language: str
    duration: float

    @property
    def text(self) -> str:
        """Return the plain text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def usage(self) -> dict[str, Any]:
        """Return the usage object of the OpenAI API."""
        return {"type": "duration", "seconds": max(1, round(self.duration))}


def content_type(options: SpeechOptions) -> str:
    """Return the content type of the answer."""
    return EVENTS if options.stream else _TYPES.get(options.format, "text/plain; charset=utf-8")


def written(transcript: Transcript, options: SpeechOptions) -> bytes:
    """Return a transcript in the requested format."""
    if options.format == "json":
        return _json({"text": transcript.text, "usage": transcript.usage})
    if options.format == "verbose_json":
        return _json(_verbose(transcript, options))
    return _LINES[options.format](transcript).encode()


def delta(text: str) -> bytes:
    """Return the event of a piece of text."""
    return b"data: " + _json({"type": "transcript.text.delta", "delta": text}) + b"\n\n"


def done(transcript: Transcript) -> bytes:
    """Return the last event of a stream."""
    last = {"type": "transcript.text.done", "text": transcript.text, "usage": transcript.usage}
    return b"data: " + _json(last) + b"\n\n"


def failed(error: KvferryError) -> bytes:
    """Return the event that ends a stream which has begun and fails."""
    return b"data: " + _json(error.body()) + b"\n\n"


def _verbose(transcript: Transcript, options: SpeechOptions) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "task": "translate" if options.translate else "transcribe",
        "language": LANGUAGES.get(transcript.language, transcript.language),
        "duration": round(transcript.duration, 2),
        "text": transcript.text,
        "usage": transcript.usage,
    }
    if options.segments:
        answer["segments"] = [{**asdict(segment), "words": None} for segment in transcript.segments]
        for segment in answer["segments"]:
            del segment["words"]
    if options.words:
        answer["words"] = [asdict(word) for segment in transcript.segments for word in segment.words]
    return answer


def _plain(transcript: Transcript) -> str:
    return transcript.text + "\n"


def _subrip(transcript: Transcript) -> str:
    cues = (
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment).replace('-->', '->')}"
        for number, segment in enumerate(transcript.segments, 1)
    )
    return "".join(f"{cue}\n\n" for cue in cues)


def _webvtt(transcript: Transcript) -> str:
    cues = (
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{html.escape(_line(segment), quote=False)}\n\n"
        for segment in transcript.segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    return " ".join(segment.text.split())


def _time(seconds: float, mark: str) -> str:
    whole = max(0, round(seconds * 1000))
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


_LINES = {"text": _plain, "srt": _subrip, "vtt": _webvtt}
