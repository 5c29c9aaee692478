"""Decodes a request's image file to an RGB picture, with a bound on its pixels."""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import Image, ImageOps, PngImagePlugin

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.media import MAX_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are decoded, by Pillow's names; of an animation its first frame."""
MAX_EXIF_BYTES = 2**16
"""Largest EXIF header, in bytes: a JPEG's segment. Pillow reads one entry after the other, in Python."""
PngImagePlugin.MAX_TEXT_MEMORY = 4 * 2**20  # inflated texts of a PNG; Pillow's own limit takes 0.2 s
warnings.filterwarnings("ignore", module=r"PIL\.")  # a damaged EXIF header brings a warning for each entry


def picture(data: bytes, field: str) -> Image.Image:
    """Return the RGB picture of a file's bytes, upright; transparent parts become white.

    Raises InvalidRequest naming the field."""
    try:
        found = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _large(field) from error
    except ValueError as error:  # one of its bounds
        raise _damaged(field, error) from error
    except Exception as error:  # decoders of damaged files raise anything
        raise InvalidRequest(f"{field} is not a picture in PNG, JPEG, WebP or GIF", param=field) from error
    if found.width * found.height > MAX_PIXELS:
        raise _large(field)
    try:
        found.load()
        if len(found.info.get("exif", b"")) > MAX_EXIF_BYTES:
            raise ValueError(f"its EXIF header is longer than {MAX_EXIF_BYTES} bytes")
        return _opaque(ImageOps.exif_transpose(found))
    except Exception as error:
        raise _damaged(field, error) from error


def _large(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} has more than {MAX_PIXELS} pixels, which is the limit", param=field)


def _damaged(field: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{field} is damaged: {error}", param=field)


def _opaque(found: Image.Image) -> Image.Image:
    if not found.has_transparency_data:
        return found.convert("RGB")
    found = found.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", found.size, "white"), found).convert("RGB")
