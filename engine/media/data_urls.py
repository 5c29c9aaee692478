"""Decodes the base64 of a data URL that holds an image or audio of a chat."""

from __future__ import annotations

from io import BytesIO

from kvferry.protocol.base64_text import decoded_slices
from kvferry.protocol.errors import InvalidRequest


def data_of(url: str, field: str) -> bytes:
    """Return the bytes of a data URL. Raises InvalidRequest naming the field.

    It decodes in slices, so that other threads of the node run in between."""
    data = BytesIO()
    try:
        for piece in decoded_slices(url, url.find(",") + 1):
            data.write(piece)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid base64", param=field) from error
    return data.getvalue()  # without a copy
