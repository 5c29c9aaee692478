"""Hostile clients that send images (too large, too many, damaged, valid ones of the largest size), or their bytes."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Iterator
from math import isqrt
from typing import Any

from benchmarks import attacking
from benchmarks.attacking import asking, forever

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
LONG = 11 * 2**20
"""Bytes of a large image; in base64 nearly what a body may have."""


def chunk(name: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, length: int = 0, behind: bytes = b"") -> bytes:
    """Return an image of black rows as its header declares them if these are few, and zeros up to a length.

    behind: chunks behind its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height)) if width * height < 2**16 else b""
    whole = _SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + behind + chunk(b"IEND", b"")
    return whole.ljust(length, b"\0")


def noise(side: int) -> bytes:
    """Return an image of grey pixels that no compression makes smaller."""
    source = random.Random(side)
    rows = b"".join(b"\0" + source.randbytes(side) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return _SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _text(url: str) -> dict[str, Any]:
    return {"type": "text", "text": url}


def _chat(content: list[dict[str, Any]]) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return asking("/v1/chat/completions", body | ({"model": name} if (name := attacking.media_model) else {}))


async def pictures(port: int) -> None:
    """Send images that are refused for one reason each, and large ones that are not."""
    requests = [_chat([_image(url) for url in urls]) for urls in _hostile()]
    await forever(port, 4, lambda turn: requests[turn % len(requests)])


async def picture_bytes(port: int) -> None:
    """Send what `pictures` sends as texts, which are refused by their length: the cost of reading these bytes."""
    requests = [_chat([_text(url) for url in urls]) for urls in _hostile()]
    await forever(port, 4, lambda turn: requests[turn % len(requests)])


def _hostile() -> Iterator[list[str]]:
    """Yield the images of each request."""
    scan = b"\xff\xda\x00\x08" + bytes(6) + b"\xff\0"
    jpeg = b"\xff\xd8\xff\xc2" + struct.pack(">HBHHB", 8, 8, 9, 9, 0) + scan
    yield [data_url(png(2**31 - 1, 2**31 - 1))]
    yield [data_url(png(60_000, 60_000, LONG))]
    yield [data_url(png(8, 8))] * 1000
    yield [data_url(jpeg + scan * (LONG // len(scan)), "image/jpeg")]
    yield [data_url(jpeg + b"\xff\0" * (LONG // 2) + scan * 200, "image/jpeg")]
    yield [data_url(png(8, 8, LONG))[:-3] + "!=="]
    yield [data_url(png(8, 8, LONG), "image/webp")]
    yield [data_url(png(8, 8, LONG))]
    yield [data_url(noise(isqrt(LONG)))]
