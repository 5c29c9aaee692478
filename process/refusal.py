"""An error as the bytes of an answer, where no application is there to give it."""

from __future__ import annotations

import json
import math

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from protocol.errors import KvferryError


def refusal(error: KvferryError) -> bytes:
    """The last answer on a connection: an error object, and that it ends here."""
    body = json.dumps(error.body()).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    if error.retry_after is not None:
        head += b"retry-after: %d\r\n" % math.ceil(error.retry_after)
    return STATUS_LINE[error.status] + head + b"\r\n" + body
