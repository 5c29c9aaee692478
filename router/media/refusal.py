"""InvalidMedia: the error for one image, audio or video of a request, and a function that builds it."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidRequest


class InvalidMedia(InvalidRequest):
    """A medium is rejected; `param` is where the client wrote it, also in requests that are translated into chats."""


def refused(field: str, why: str) -> InvalidMedia:
    """Return the error of a field. why: completes the sentence that begins with the field."""
    return InvalidMedia(f"{field} {why}", param=field)
