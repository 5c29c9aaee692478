"""Recognises formats of images, audio and video by their first bytes, and checks the header of WAV files."""

from __future__ import annotations

import struct

FORMATS = {
    "image": ("image/png", "image/jpeg", "image/webp", "image/gif"),
    "audio": ("audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"),
    "video": ("video/mp4", "video/webm"),
}
"""Accepted MIME types of each modality."""
COMPRESSED = ("audio/flac", "audio/ogg")
"""MIME types of audio in chats that are sent only to engines with `COMPRESSED_AUDIO`.

Of WAV and MP3 the decoded length follows from their size; hours of silence in FLAC or Opus take nearly no bytes."""
SPEECH = ("audio/wav", "audio/mpeg", "audio/flac", "audio/ogg", "video/mp4", "video/webm")
"""MIME types of files that can be transcribed; MP4 and WebM may hold sound alone."""
_ALIASES = {
    "image/jpg": "image/jpeg", "audio/x-wav": "audio/wav", "audio/wave": "audio/wav", "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg", "audio/x-flac": "audio/flac", "application/ogg": "audio/ogg", "audio/opus": "audio/ogg",
}  # fmt: skip
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
"""Codecs of WAV files that are not compressed."""
MAX_CHUNKS = 64
"""Largest number of chunks before the format of a WAV file."""
MIN_RATE, MAX_RATE = 4000, 384_000
"""Lowest and highest sample rate of a WAV file, in Hz: at a low rate a few bytes last for hours."""


def usual_name(mime: str) -> str:
    """Return the usual name of a MIME type, without parameters."""
    plain = mime.partition(";")[0].strip().lower()
    return _ALIASES.get(plain, plain)


def format_of(data: bytes) -> str:
    """Return the MIME type that the first bytes show; empty for any other format."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(bytes(data[8:12]), "")
    if data.startswith(b"ID3") or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "audio/mpeg"  # the frame's layer is III
    if data.startswith((b"fLaC", b"OggS")):
        return "audio/flac" if data[:1] == b"f" else "audio/ogg"
    if data[4:8] == b"ftyp":
        return "video/mp4"
    return "video/webm" if data.startswith(b"\x1a\x45\xdf\xa3") else ""


def wav_fault(data: bytes) -> str:
    """Return why a WAV file is rejected; empty if it is accepted."""
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and size >= 16 and at + 24 <= len(data):
            codec, channels, rate = struct.unpack_from("<HHI", data, at + 8)
            if codec not in (_PCM, _FLOAT, _EXTENSIBLE):
                return f"its codec {codec} is compressed; use PCM"
            if not (MIN_RATE <= rate <= MAX_RATE and 1 <= channels <= 8):
                return f"it must have {MIN_RATE} to {MAX_RATE} Hz and 1 to 8 channels, got {rate} and {channels}"
            return ""
        at += 8 + size + size % 2
    return "it has no format chunk"
