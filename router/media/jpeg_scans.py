"""Rejects JPEGs with too many scans, since a decoder goes through all pixels for each scan."""

from __future__ import annotations

import re
import struct

from kvferry.router.long_work import LongWork
from kvferry.router.media.image_size import MAX_STEPS, UnreadableImage

MAX_SCANS = 100
"""Largest number of scans of a JPEG; encoders write about ten."""
MAX_SCANNED_PIXELS = 2**29
"""Largest product of a JPEG's scans and pixels: a decoder took 0.4 ns for each (Zen 5)."""
SLICE = 2**16
"""Bytes that are searched before other requests get a turn."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)
"""A marker that begins or ends something, or a fill byte; pixel data also contain 0xff before a zero, and restarts."""
_ALONE, _START, _END, _SCAN, _FILL = 0x01, 0xD8, 0xD9, 0xDA, 0xFF


async def check_scans(data: bytes, pixels: int = 1) -> None:
    """Raise UnreadableImage for a JPEG with too many scans for its pixels; what follows its end does not count."""
    at, scans, max_scans, work = 0, 0, min(MAX_SCANS, MAX_SCANNED_PIXELS // pixels), LongWork()
    for _ in range(MAX_STEPS):
        while (found := _MARKER.search(data, at, at + SLICE)) is None:
            at += SLICE - 1  # a marker may lie across two slices
            if at >= len(data):
                return
            await work.pause()
        at, marker = found.end(), data[found.start() + 1]
        if marker == _END or at + 2 > len(data):
            return
        scans += marker == _SCAN
        if scans > max_scans:
            raise UnreadableImage(f"has more than {max_scans} scans")
        if marker == _FILL:
            at -= 1
        elif marker not in (_ALONE, _START):
            at += struct.unpack_from(">H", data, at)[0]
    raise UnreadableImage(f"has more than {MAX_STEPS} parts")
