"""Data URLs of a rendered chat's media."""

from __future__ import annotations

import base64

from kvferry.protocol.errors import InvalidRequest


def data_of(url: str, field: str) -> bytes:
    """Return the bytes of a data URL. Raises InvalidRequest naming the field."""
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field} holds no valid base64", param=field) from error
