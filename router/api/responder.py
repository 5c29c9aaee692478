"""Responder: writes the HTTP response of one request: headers, body or event stream, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Send

from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.router.api.http_errors import error_body, error_event
from kvferry.router.api.sse import COMMENT, dump
from kvferry.runtime.rejection import retry_headers

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def no_chunk(data: bytes) -> bool:
    """Write nothing: the server has no short cut, and everything goes through `send`."""
    return False


@dataclass(slots=True)
class Responder:
    """Response to one request to `path`.

    After `begin_stream` or `keep_alive`, errors appear only inside the stream. `more` returns additional headers, read
    when the response begins. `write_chunk`: see ResponseCycle."""

    send: Send
    path: str
    more: Callable[[], Mapping[str, str]] = dict
    write_chunk: Callable[[bytes], bool] = no_chunk
    _started: bool = False
    _failing: Callable[[KvferryError], bytes] | None = None

    async def begin_stream(self, headers: Mapping[str, str], failing: Callable[[KvferryError], bytes]) -> None:
        """Begin a stream of events; `failing` returns its last events after an error."""
        self._failing = failing
        if not self._started:
            await self._start(200, _EVENTS, {**_STREAM_HEADERS, **headers})

    async def keep_alive(self) -> None:
        """Send a comment, which begins a stream that has not begun; its headers lack values that are not known yet."""
        if not self._started:
            self._failing = lambda error: error_event(error, self.path)
            await self._start(200, _EVENTS, _STREAM_HEADERS)
        await self.write(COMMENT)

    def write(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        """Send a part of the body."""
        return self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
        """Send a complete answer with `value` as JSON."""
        await self.json(status, dump(value), headers)

    async def json(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        """Send a complete answer whose body is JSON already."""
        await self._start(status, _JSON, {**headers, "content-length": str(len(data))})
        await self.write(data, more=False)

    async def content(self, media_type: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Send a complete answer of any type."""
        await self._start(200, media_type, {**headers, "content-length": str(len(data))})
        await self.write(data, more=False)

    async def fail(self, error: KvferryError) -> None:
        """Send an error as a response or as events; send nothing to a client that has left."""
        if isinstance(error, Cancelled):
            return
        if not self._started:
            await self.whole(error.status, error_body(error, self.path), retry_headers(error.status, error.retry_after))
        elif self._failing is not None:
            await self.write(self._failing(error), more=False)

    def over(self) -> None:
        """Drop the reference to the answer after its end."""
        self._failing = None

    async def _start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        pairs = [(b"content-type", media_type.encode())]
        pairs += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in {**headers, **self.more()}.items()
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})
        self._started = True


class Finishing(Protocol):
    """Answer whose last bytes are still to be sent."""

    async def finish(self, responder: Responder) -> None:
        """Send the last bytes."""
