"""Rejects JPEGs with too many scans, since a decoder goes through all pixels for each scan."""

from __future__ import annotations

import struct

from kvferry.router.long_work import LongWork
from kvferry.router.media.image_size import MAX_STEPS, UnreadableImage

MAX_SCANS = 100
"""Largest number of scans of a JPEG; encoders write about ten."""
MAX_SCANNED_PIXELS = 2**29
"""Largest product of a JPEG's scans and pixels: a decoder took 0.4 ns for each (Zen 5)."""
SLICE = 2**15
"""Bytes that are searched before other requests get a turn; fewer than are decoded for a first check."""
_KINDS = bytes(255 if byte == 255 else byte > 0 and not 0xD0 <= byte <= 0xD7 for byte in range(256))
"""Table of bytes.translate: 0 for bytes that follow 0xff among pixels (a zero, a restart), 1 for those of markers."""
_MARKER = b"\xff\x01"
"""Marker in a translated slice. Fill bytes, which are 0xff, may stand before it."""
_FILL = b"\xff" * MAX_STEPS
"""A run of fill bytes that is refused where a slice begins with it; each counts as a part."""
_ALONE, _START, _END, _SCAN = 0x01, 0xD8, 0xD9, 0xDA


async def check_scans(data: bytes, pixels: int = 1) -> None:
    """Raise UnreadableImage for a JPEG with too many scans for its pixels; what follows its end does not count."""
    at, scans, max_scans, markers = 0, 0, min(MAX_SCANS, MAX_SCANNED_PIXELS // pixels), _Markers(data)
    for _ in range(MAX_STEPS):
        at = await markers.end_of_next(at)
        marker = data[at - 1]
        if marker == _END or at + 2 > len(data):
            return
        scans += marker == _SCAN
        if scans > max_scans:
            raise UnreadableImage(f"has more than {max_scans} scans")
        if marker not in (_ALONE, _START):
            at += struct.unpack_from(">H", data, at)[0]
    raise _too_many_parts()


class _Markers:
    """Searches a JPEG for markers in order, each slice of it translated once.

    A regular expression takes twice as long for pixel data that are full of 0xff."""

    def __init__(self, data: bytes) -> None:
        self._data, self._begin, self._kinds, self._work = data, -SLICE, b"", LongWork()

    async def end_of_next(self, at: int) -> int:
        """Return the place after the next marker's two bytes, or the length of the data; raise UnreadableImage."""
        while at < len(self._data):
            begin = at - at % SLICE
            if begin != self._begin:
                await self._work.pause()
                self._begin, self._kinds = begin, self._data[begin : begin + SLICE + 1].translate(_KINDS)
                if self._kinds.startswith(_FILL):
                    raise _too_many_parts()
            if (found := self._kinds.find(_MARKER, at - begin)) >= 0:
                return begin + found + 2
            at = begin + SLICE
        return len(self._data)


def _too_many_parts() -> UnreadableImage:
    return UnreadableImage(f"has more than {MAX_STEPS} parts")
