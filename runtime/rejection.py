"""Retry-After of rejected requests, and a rejection as raw bytes for servers without an application."""

from __future__ import annotations

import asyncio
import json
import math

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvferry.protocol.errors import KvferryError

RETRY_AFTER_S = {429: 1.0, 503: 5.0}
"""A place is free again after about a token's time, a node after its restart."""


def retry_headers(status: int, seconds: float | None = None) -> dict[str, str]:
    """Retry-After in whole seconds, for the statuses that ask a client to come back; without `seconds` what suits the
    status."""
    if status not in RETRY_AFTER_S:
        return {}
    return {"retry-after": str(max(1, math.ceil(RETRY_AFTER_S[status] if seconds is None else seconds)))}


def refusal(error: KvferryError) -> bytes:
    """The last answer on a connection: an error object, and that it ends here."""
    body = json.dumps(error.body()).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    for name, value in retry_headers(error.status, error.retry_after).items():
        head += f"{name}: {value}\r\n".encode()
    return STATUS_LINE[error.status] + head + b"\r\n" + body


def end(
    transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, last: bytes, after_s: float
) -> asyncio.TimerHandle | None:
    """Close a connection behind its last bytes, after so many seconds in which nothing is read of it.

    Returns the timer of that, if there is one."""

    def close() -> None:
        if last:
            transport.write(last)
        transport.close()

    if after_s <= 0:
        close()
        return None
    transport.pause_reading()
    return loop.call_later(after_s, close)
