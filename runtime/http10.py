"""Responses to HTTP/1.0 clients: without chunked encoding, ended by the close of the connection.

uvicorn would send chunks to HTTP/1.0 clients too. `ab` and some proxies use that version.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wrap the application for one HTTP/1.0 request: the response is unchunked and ends when the connection closes."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        cycle.chunked_encoding = False
        await app(scope, receive, plain)

    return answered
