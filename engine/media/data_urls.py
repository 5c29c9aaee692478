"""Data URLs of a rendered chat's media."""

from __future__ import annotations

from io import BytesIO

from kvferry.protocol.base64_text import decoded_slices
from kvferry.protocol.errors import InvalidRequest


def data_of(url: str, field: str) -> bytes:
    """Return the bytes of a data URL. Raises InvalidRequest naming the field.

    Streams of the node go on between two slices."""
    data = BytesIO()
    try:
        for piece in decoded_slices(url, url.find(",") + 1):
            data.write(piece)
    except ValueError as error:
        raise InvalidRequest(f"{field} holds no valid base64", param=field) from error
    return data.getvalue()  # without a copy
