"""Data URLs with base64."""

from __future__ import annotations

import asyncio
import base64
import binascii

from kvferry.router.media.limits import MAX_MEDIA_BYTES
from kvferry.router.media.refusal import InvalidMedia, refused

SLICE = 2**16
"""Characters decoded before other requests get a turn; a multiple of 4."""
MAX_MIME = 128
"""Longest MIME type in characters."""


def is_data_url(url: str) -> bool:
    """Return whether a URL holds its data."""
    return url[:5].lower() == "data:"


def opened(url: str, field: str) -> tuple[bytes, str]:
    """Return the first bytes of a data URL and their declared MIME type; raise InvalidMedia naming the field.

    The rest may still be damaged."""
    mime, begin = _checked(url, field)
    return _piece(url, begin, field), mime


async def decoded(url: str, field: str) -> bytes:
    """Return the bytes of a data URL; raise InvalidMedia naming the field."""
    _, begin = _checked(url, field)
    data = bytearray()
    for start in range(begin, len(url), SLICE):
        data += _piece(url, start, field)
        await asyncio.sleep(0)
    return bytes(data)


def _checked(url: str, field: str) -> tuple[str, int]:
    """Return the MIME type and the place of the data; raise InvalidMedia if their length or their end is wrong."""
    end = url.find(",", 0, MAX_MIME + len("data:;base64,"))
    mime, mark, coding = url[5:end].rpartition(";")
    if end < 0 or not mark or coding.strip().lower() != "base64":
        raise refused(field, "must begin with data:<MIME type>;base64,")
    size = len(url) - end - 1
    if size * 3 // 4 > MAX_MEDIA_BYTES:
        raise refused(field, f"has more than {MAX_MEDIA_BYTES} bytes")
    if not size or size % 4 or 0 <= url.find("=", end) < len(url) - 2:
        raise _damaged(field)
    return mime, end + 1


def _piece(url: str, start: int, field: str) -> bytes:
    try:
        return binascii.a2b_base64(url[start : start + SLICE], strict_mode=True)
    except ValueError:
        raise _damaged(field) from None


def data_url(data: bytes, mime: str) -> str:
    """Return the data URL of these bytes."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _damaged(field: str) -> InvalidMedia:
    return refused(field, "holds no valid base64: it is cut off, or has other characters")
