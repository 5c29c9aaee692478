"""Data URLs with base64."""

from __future__ import annotations

import asyncio
import base64
import binascii

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.media.limits import MAX_MEDIA_BYTES

SLICE = 2**18
"""Characters decoded before other requests get a turn; a multiple of 4."""
MAX_MIME = 128
"""Longest MIME type in characters."""


def is_data_url(url: str) -> bool:
    """Return whether a URL holds its data."""
    return url[:5].lower() == "data:"


async def decoded(url: str, field: str) -> tuple[bytes, str]:
    """Return the bytes of a data URL and their declared MIME type; raise InvalidRequest naming the field."""
    end = url.find(",", 0, MAX_MIME + len("data:;base64,"))
    mime, mark, coding = url[5:end].rpartition(";")
    if end < 0 or not mark or coding.strip().lower() != "base64":
        raise InvalidRequest(f"{field} must begin with data:<MIME type>;base64,", param=field)
    size = len(url) - end - 1
    if size * 3 // 4 > MAX_MEDIA_BYTES:
        raise InvalidRequest(f"{field} has more than {MAX_MEDIA_BYTES} bytes", param=field)
    if not size or size % 4 or 0 <= url.find("=", end) < len(url) - 2:
        raise _damaged(field)
    data = bytearray()
    for start in range(end + 1, len(url), SLICE):
        try:
            data += binascii.a2b_base64(url[start : start + SLICE], strict_mode=True)
        except ValueError:
            raise _damaged(field) from None
        await asyncio.sleep(0)
    return bytes(data), mime


def data_url(data: bytes, mime: str) -> str:
    """Return the data URL of these bytes."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _damaged(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} holds no valid base64: it is cut off, or has other characters", param=field)
