"""Decodes base64 data URLs, in slices and within the size limit."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

from kvferry.router.long_work import LongWork
from kvferry.router.media.base64_text import decoded_slices
from kvferry.router.media.limits import MAX_MEDIA_BYTES
from kvferry.router.media.refusal import refused

MAX_MIME = 128
"""Longest MIME type in characters."""


def is_data_url(url: str) -> bool:
    """Return whether a URL holds its data."""
    return url[:5].lower() == "data:"


def opened(url: str, field: str) -> tuple[bytes, str]:
    """Return the first bytes of a data URL and their declared MIME type; raise InvalidMedia naming the field.

    The rest may still be damaged."""
    mime, begin = _checked(url, field)
    return next(_slices(url, begin, field)), mime


async def decoded(url: str, field: str) -> bytes:
    """Return the bytes of a data URL; raise InvalidMedia naming the field."""
    _, begin = _checked(url, field)
    return await decoded_base64(url, field, begin)


async def decoded_base64(text: str, field: str, begin: int = 0) -> bytes:
    """Return the bytes of the base64 after the first `begin` characters; raise InvalidMedia naming the field."""
    data, work = BytesIO(), LongWork()
    for piece in _slices(text, begin, field):
        data.write(piece)
        await work.pause()
    return data.getvalue()  # without a copy


def _checked(url: str, field: str) -> tuple[str, int]:
    """Return the MIME type and the place of the data; raise InvalidMedia if the data are too long."""
    end = url.find(",", 0, MAX_MIME + len("data:;base64,"))
    mime, mark, coding = url[5:end].rpartition(";")
    if end < 0 or not mark or coding.strip().lower() != "base64":
        raise refused(field, "must begin with data:<MIME type>;base64,")
    size = len(url) - end - 1
    if size * 3 // 4 > MAX_MEDIA_BYTES:
        raise refused(field, f"has more than {MAX_MEDIA_BYTES} bytes")
    return mime, end + 1


def _slices(url: str, begin: int, field: str) -> Iterator[bytes]:
    try:
        yield from decoded_slices(url, begin)
    except ValueError:
        raise refused(field, "is not valid base64: it is cut off, or has other characters") from None
