"""HTTP connections that survive cancelled requests: an edge of httpcore made safe.

httpcore 1.0 forgets a connection whose request is cancelled after the connection was begun and before the request is
being sent (encode/httpcore#1093): nobody uses or closes it, and its socket stays open for ever. Clients that leave
cancel requests all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx

SENDING = "send_request_headers.started"
"""End of the name of httpcore's trace event from which on a cancel closes the connection."""


class CancelSafeTransport(httpx.AsyncBaseTransport):
    """Passes requests on. A cancelled one ends at once for its caller; behind it the request goes on until it is being
    sent (the connect timeout bounds that) and is cancelled then."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self._abandoned: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sending = asyncio.Event()

        async def trace(event: str, _: Any) -> None:
            if event.endswith(SENDING):
                sending.set()

        request.extensions = {**request.extensions, "trace": trace}
        task = asyncio.create_task(self._transport.handle_async_request(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            abandoned = asyncio.create_task(_abandon(task, sending))
            self._abandoned.add(abandoned)
            abandoned.add_done_callback(self._abandoned.discard)
            raise

    async def aclose(self) -> None:
        await asyncio.gather(*self._abandoned)
        await self._transport.aclose()


async def _abandon(task: asyncio.Task[httpx.Response], sending: asyncio.Event) -> None:
    sent = asyncio.create_task(sending.wait())
    await asyncio.wait((task, sent), return_when=asyncio.FIRST_COMPLETED)
    sent.cancel()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        response = await task
        await response.aclose()
