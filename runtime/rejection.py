"""HTTP rejections: the Retry-After header, an error response as raw bytes, and the close of a rejected connection."""

from __future__ import annotations

import asyncio
import json
import math

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvferry.protocol.errors import KvferryError

RETRY_AFTER_S = {429: 1.0, 503: 5.0}
"""Default Retry-After in seconds by status: capacity frees after about one token, a node returns after a restart."""

LINGER_S = 5.0
"""Maximum time for which the rest of a rejected request is read and dropped, in seconds."""
MAX_DRAINED_BYTES = 64 << 20
"""Maximum number of bytes of a rejected request that are read and dropped."""


def retry_headers(status: int, seconds: float | None = None) -> dict[str, str]:
    """Return the Retry-After header in whole seconds for a status that invites a retry, else no header.

    seconds: None takes the status's default."""
    if status not in RETRY_AFTER_S:
        return {}
    return {"retry-after": str(max(1, math.ceil(RETRY_AFTER_S[status] if seconds is None else seconds)))}


def refusal(error: KvferryError) -> bytes:
    """Return a whole HTTP response with the error object and `connection: close`."""
    body = json.dumps(error.body()).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    for name, value in retry_headers(error.status, error.retry_after).items():
        head += f"{name}: {value}\r\n".encode()
    return STATUS_LINE[error.status] + head + b"\r\n" + body


def end(
    transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, last: bytes, after_s: float, *, linger: bool
) -> asyncio.TimerHandle | None:
    """Write the last bytes and close the connection, after `after_s` seconds during which nothing is read from it.

    linger: close only for writing and keep reading for LINGER_S. If the connection closed while the peer still sends,
    the peer would see a reset and lose the response. Returns the timer of the delay; None without one."""

    def close() -> None:
        if last:
            transport.write(last)
        if not linger or transport.is_closing():
            return transport.close()
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        loop.call_later(LINGER_S, transport.close)

    if after_s <= 0:
        close()
        return None
    transport.pause_reading()
    return loop.call_later(after_s, close)
