"""Reads the size of a PNG, JPEG, GIF or WebP image from its headers, without decoding it.

Headers may declare a size more than once. What counts is the largest one, since a decoder may believe any of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import repeat

Size = tuple[int, int]
"""Width and height in pixels."""
MAX_STEPS = 4096
"""Largest number of a PNG's or WebP's chunks, and of segments or sub-blocks before the pixels of others.

Reading them keeps an event loop busy: the router's for a millisecond, a decoder's for two seconds per million."""


class UnreadableImage(ValueError):
    """An image without a readable header; the text completes the sentence "it …"."""


def image_size(data: bytes, mime: str) -> Size:
    """Return the largest declared size. Raises UnreadableImage."""
    reader = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}[mime]
    try:
        sizes = reader(data)
    except (struct.error, IndexError) as error:
        raise UnreadableImage("is cut off in its header") from error
    if not sizes or any(0 in size for size in sizes):
        raise UnreadableImage("declares no size")
    return max(width for width, _ in sizes), max(height for _, height in sizes)


def _png(data: bytes) -> list[Size]:
    """Return the sizes of all header chunks; a decoder reads the chunks behind the pixels, too."""
    sizes, at = list[Size](), 8
    for _ in _steps():
        if at + 8 > len(data):
            break
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IEND":
            break
        if name == b"IHDR":
            sizes.append(struct.unpack_from(">II", data, at + 8))
        at += 12 + length
    return sizes


def _jpeg(data: bytes) -> list[Size]:
    """Return the sizes of all frame headers before the first scan."""
    sizes, at = list[Size](), 2
    for _ in _steps():
        if data[at] != 0xFF:
            raise UnreadableImage("is damaged in its header")
        marker = data[at + 1]
        if marker == 0xDA:
            break
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD9:  # a fill byte, or a marker without a segment
            at += 1 if marker == 0xFF else 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            sizes.append((width, height))
        at += 2 + length
    return sizes


def _gif(data: bytes) -> list[Size]:
    """Return the sizes of the screen and of the first frame, which may reach beyond it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colours(flags)
    inside = False  # whether `at` is inside an extension, a row of sub-blocks
    for _ in _steps():
        if inside:
            inside, at = bool(data[at]), at + 1 + data[at]
        elif data[at] == 0x21:
            inside, at = True, at + 2
        else:
            break
    if data[at] != 0x2C:
        raise UnreadableImage("has no frame")
    left, top, wide, high = struct.unpack_from("<4H", data, at + 1)
    return [(width, height), (left + wide, top + high)]


def _colours(flags: int) -> int:
    """Return the bytes of a colour table."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes) -> list[Size]:
    """Return the sizes of the canvas and of all frames."""
    sizes, at = list[Size](), 12
    for _ in _steps():
        if at + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        body = at + 8
        if name == b"VP8X":
            sizes.append((1 + _int24(data, body + 4), 1 + _int24(data, body + 7)))
        elif name == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, body + 6)
            sizes.append((width & 0x3FFF, height & 0x3FFF))
        elif name == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, body + 1)
            sizes.append((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        elif name == b"ANMF":
            sizes.append((1 + _int24(data, body + 6), 1 + _int24(data, body + 9)))
        at = body + length + length % 2
    return sizes


def _steps() -> Iterator[None]:
    """Yield MAX_STEPS times, then raise UnreadableImage."""
    yield from repeat(None, MAX_STEPS)
    raise UnreadableImage(f"has more than {MAX_STEPS} parts")


def _int24(data: bytes, at: int) -> int:
    if at + 3 > len(data):
        raise UnreadableImage("is cut off in its header")
    return int.from_bytes(data[at : at + 3], "little")
