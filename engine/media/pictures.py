"""Decodes a request's image file to an RGB picture, with a bound on its pixels."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageOps

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.media import MAX_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are decoded, by Pillow's names; of an animation its first frame."""


def picture(data: bytes, field: str) -> Image.Image:
    """Return the RGB picture of a file's bytes, upright; transparent parts become white.

    Raises InvalidRequest naming the field."""
    try:
        found = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _large(field) from error
    except Exception as error:  # decoders of damaged files raise anything
        raise InvalidRequest(f"{field} is no picture in PNG, JPEG, WebP or GIF", param=field) from error
    if found.width * found.height > MAX_PIXELS:
        raise _large(field)
    try:
        found.load()
        return _opaque(ImageOps.exif_transpose(found))
    except Exception as error:
        raise InvalidRequest(f"{field} is damaged: {error}", param=field) from error


def _large(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} has more than {MAX_PIXELS} pixels, which is the limit", param=field)


def _opaque(found: Image.Image) -> Image.Image:
    if not found.has_transparency_data:
        return found.convert("RGB")
    found = found.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", found.size, "white"), found).convert("RGB")
