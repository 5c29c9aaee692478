"""Guards FFmpeg against audio files that it would expand far beyond their size: ID3 tags and huge MP4 tables."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator

MAX_SAMPLES = 2**23
"""Largest number of samples in all tracks of an MP4 file, times its edits: each takes about 50 bytes in FFmpeg."""
_ID3_HEADER = 10
_TAGS = re.compile(rb"ID3(?=[\x02-\x04])")
_TABLES = re.compile(rb"stsz|stz2|trun|elst|cmov")
_COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4, b"elst": 4}
"""Bytes from a table's name's end to the number of its entries."""


def readable(data: bytes, format: str) -> io.BytesIO:
    """Return a file for FFmpeg, without ID3 tags, whose compressed frames it would inflate. format: FFmpeg's name."""
    if format == "mp3":
        return _Tail(data, _after_tags(data))
    return io.BytesIO(_TAGS.sub(b"id_", data) if format == "wav" and _TAGS.search(data) else data)


def mp4_fault(data: bytes) -> str:
    """Return why an MP4 file is refused; empty if it is not. A table of a few bytes can claim billions of samples."""
    samples, edits = 0, 0
    for first, last in _boxes(data):
        for found in _TABLES.finditer(data, first, last):
            if (name := found[0]) == b"cmov":
                return "its header is compressed"
            at = found.end() + _COUNTS[name]
            count = int.from_bytes(data[at : at + 4], "big")
            samples, edits = (samples, edits + count) if name == b"elst" else (samples + count, edits)
    if (entries := samples * max(1, edits)) > MAX_SAMPLES:
        return f"its tables have {entries} entries, at most {MAX_SAMPLES} are read; convert it to WAV or FLAC"
    return ""


def _boxes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each top-level box but media data begins and ends; what cannot be parsed counts as one."""
    at = 0
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at) if at + 8 <= len(data) else (0, b"")
        if size == 1 and at + 16 <= len(data):
            size = struct.unpack_from(">Q", data, at + 8)[0]
        end = min(at + size, len(data)) if size >= 8 else len(data)
        if name != b"mdat" or size < 8:
            yield at, end
        at = end


def _after_tags(data: bytes) -> int:
    """Return the place after the tags at the beginning of an MP3 file."""
    at = 0
    while data[at : at + 3] == b"ID3" and at + _ID3_HEADER <= len(data):
        size = 0
        for byte in data[at + 6 : at + _ID3_HEADER]:
            size = size << 7 | byte & 0x7F
        footer = _ID3_HEADER if data[at + 5] & 0x10 else 0
        at += _ID3_HEADER + size + footer
    return at


class _Tail(io.BytesIO):
    """File whose first bytes are hidden. It shares the bytes that it is given."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start
        self.seek(0)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a place and return it."""
        return super().seek(offset + self._start if whence == 0 else offset, whence) - self._start

    def tell(self) -> int:
        """Return the place."""
        return super().tell() - self._start
