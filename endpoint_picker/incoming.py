"""Reader of the messages on a stream from Envoy, with a time limit for each, and of a request's body on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from kvferry.protocol.errors import SlowRequest

_MAX_WAIT_S = 3600.0


class ProtocolError(Exception):
    """A message that Envoy must not send at this point."""


class Incoming:
    """Reader of a stream; the owner must call `close`. 0 seconds: no limit."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._ahead: asyncio.Task[Any] | None = None

    async def read(self, limit_s: float = 0.0) -> Any:
        """Return the next message, or None at the end of the stream; raise TimeoutError."""
        task = self._next()
        done, _ = await asyncio.wait((task,), timeout=limit_s or _MAX_WAIT_S)
        if not done:
            raise TimeoutError
        self._ahead = None
        return task.result()

    async def departure(self) -> Message:
        """Wait for the end of the stream and return it as an ASGI message; a message before it is kept."""
        task = self._next()
        await asyncio.wait((task,))
        if task.result() is not None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    def close(self) -> None:
        """Stop reading."""
        if self._ahead is not None:
            self._ahead.cancel()

    def _next(self) -> asyncio.Task[Any]:
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._pull())
        return self._ahead

    async def _pull(self) -> Any:
        with contextlib.suppress(StopAsyncIteration):
            return await anext(self._requests)
        return None


class IncomingBody:
    """Body of a request as an ASGI channel. `trailers` is true once trailers ended it.

    whole: it comes in a single message, even if that is not marked as the last."""

    def __init__(self, incoming: Incoming, limit_s: float, *, whole: bool) -> None:
        self._incoming, self._limit_s, self._whole = incoming, limit_s, whole
        self.trailers = False

    async def receive(self) -> Message:
        """Return the next part; raise SlowRequest if none comes in time."""
        try:
            message = await self._incoming.read(self._limit_s)
        except TimeoutError:
            raise SlowRequest(f"no part of the request body came within {self._limit_s:g} s") from None
        if message is None:
            return {"type": "http.disconnect"}
        kind = message.WhichOneof("request")
        if kind == "request_trailers":
            self.trailers = True
            return {"type": "http.request", "body": b"", "more_body": False}
        if kind != "request_body":
            raise ProtocolError(f"{kind} came before the end of the request's body")
        part = message.request_body
        return {"type": "http.request", "body": part.body, "more_body": not (part.end_of_stream or self._whole)}
