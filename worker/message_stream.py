"""Streaming HTTP response of wire messages or server-sent events, which detects a client's disconnect at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.runtime.disconnect import disconnected

log = logging.getLogger("kvferry.worker")

MEDIA_TYPE = "application/msgpack"


class MessageStreamResponse(Response):
    """Streaming response of packed `messages`, or of server-sent events.

    `on_close` runs exactly once, however the response ends, even before the first message."""

    def __init__(
        self, messages: AsyncIterator[bytes], on_close: Callable[[], None], media_type: str = MEDIA_TYPE
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._messages = messages
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_close()
            pump.cancel()
            watch.cancel()
            ended, _ = await asyncio.gather(pump, watch, return_exceptions=True)
            if isinstance(ended, Exception) and not isinstance(ended, OSError):
                log.error("a stream ended with an error", exc_info=ended)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for message in self._messages:
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
