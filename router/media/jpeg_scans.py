"""Rejects JPEGs with too many scans, since a decoder goes through all pixels for each scan."""

from __future__ import annotations

import re
import struct

from kvferry.protocol.frames import native
from kvferry.router.long_work import LongWork
from kvferry.router.media.image_size import MAX_STEPS, UnreadableImage

MAX_SCANS = 100
"""Largest number of scans of a JPEG; encoders write about ten."""
MAX_SCANNED_PIXELS = 2**29
"""Largest product of a JPEG's scans and pixels: a decoder took 0.4 ns for each (Zen 5)."""
SLICE = 2**15
"""Bytes that are searched before other requests get a turn; fewer than are decoded for a first check."""
_MARKER = re.compile(rb"\xff[^\0\xd0-\xd7\xff]", re.DOTALL)
"""A marker: among pixels, 0xff may also stand before a zero or a restart, and before a marker as a fill byte."""
_FILL = b"\xff" * MAX_STEPS
"""A run of fill bytes that is refused where a slice begins with it; each counts as a part."""
_ALONE, _START, _END, _SCAN = 0x01, 0xD8, 0xD9, 0xDA


async def check_scans(data: bytes, pixels: int = 1) -> None:
    """Raise UnreadableImage for a JPEG with too many scans for its pixels; what follows its end does not count."""
    at, scans, max_scans, work = 0, 0, min(MAX_SCANS, MAX_SCANNED_PIXELS // pixels), LongWork()
    for _ in range(MAX_STEPS):
        at = await _end_of_next(data, at, work)
        marker = data[at - 1]
        if marker == _END or at + 2 > len(data):
            return
        scans += marker == _SCAN
        if scans > max_scans:
            raise UnreadableImage(f"has more than {max_scans} scans")
        if marker not in (_ALONE, _START):
            at += struct.unpack_from(">H", data, at)[0]
    raise _too_many_parts()


async def _end_of_next(data: bytes, at: int, work: LongWork) -> int:
    """Return the place behind the next marker's two bytes, or the length of the data; raise UnreadableImage."""
    while at < len(data):
        end = at - at % SLICE + SLICE
        if (found := find_marker(data, at, end)) >= 0:
            return found + 2
        if data.startswith(_FILL, at := end):
            raise _too_many_parts()
        await work.pause()
    return len(data)


def marker_in(data: bytes, at: int, end: int) -> int:
    """Return the place in [at, end) where the next marker begins, or -1."""
    found = _MARKER.search(data, at, end + 1)
    return found.start() if found else -1


find_marker = marker_in if native is None else native.find_marker
"""`marker_in`, or its compiled twin where the extension is installed."""


def _too_many_parts() -> UnreadableImage:
    return UnreadableImage(f"has more than {MAX_STEPS} parts")
