"""Hostile clients that send images: too large, too many, damaged, and valid ones of the largest size."""

from __future__ import annotations

import base64
import struct
import zlib
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


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _chat(*urls: str) -> bytes:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return asking("/v1/chat/completions", body | ({"model": name} if (name := attacking.media_model) else {}))


async def pictures(port: int) -> None:
    """Send images that are refused for one reason each, and large ones that are not."""
    scan = b"\xff\xda\x00\x08" + bytes(6) + b"\xff\0"
    jpeg = b"\xff\xd8\xff\xc2" + struct.pack(">HBHHB", 8, 8, 9, 9, 0) + scan
    requests = [
        _chat(data_url(png(2**31 - 1, 2**31 - 1))),
        _chat(data_url(png(60_000, 60_000, LONG))),
        _chat(*[data_url(png(8, 8))] * 1000),
        _chat(data_url(jpeg + scan * (LONG // len(scan)), "image/jpeg")),
        _chat(data_url(jpeg + b"\xff\0" * (LONG // 2) + scan * 200, "image/jpeg")),
        _chat(data_url(png(8, 8, LONG))[:-3] + "!=="),
        _chat(data_url(png(8, 8, LONG), "image/webp")),
        _chat(data_url(png(8, 8, LONG))),
    ]
    await forever(port, 4, lambda turn: requests[turn % len(requests)])
