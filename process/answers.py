"""An answer in bytes, where there is no application to give one."""

from __future__ import annotations

import json
import math

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from protocol.errors import KvferryError


def raw_answer(error: KvferryError) -> bytes:
    """The whole response, for a connection that no application answers on; the connection is to be closed after it."""
    body = json.dumps(error.body()).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    if error.retry_after is not None:
        head += b"retry-after: %d\r\n" % math.ceil(error.retry_after)
    return STATUS_LINE[error.status] + head + b"\r\n" + body
