"""Response of a generation on the wire: headers, body or SSE events, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Send

from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.router.api.http_errors import shown
from kvferry.router.api.sse import dump
from kvferry.runtime.rejection import retry_headers

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(slots=True)
class Responder:
    """Response to one request to `path`.

    After `begin_stream` errors can only be told in the stream. `more` are headers of every answer, asked for as it
    begins."""

    send: Send
    path: str
    more: Callable[[], Mapping[str, str]] = dict
    _started: bool = False
    _failing: Callable[[KvferryError], bytes] | None = None

    async def begin_stream(self, headers: Mapping[str, str], failing: Callable[[KvferryError], bytes]) -> None:
        """`failing` makes the last events of a stream that an error ends."""
        self._failing = failing
        await self._start(200, _EVENTS, {**_STREAM_HEADERS, **headers})

    def write(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        return self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
        await self.json(status, dump(value), headers)

    async def json(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        """A whole body that is JSON already."""
        await self._start(status, _JSON, {**headers, "content-length": str(len(data))})
        await self.write(data, more=False)

    async def fail(self, error: KvferryError) -> None:
        """Tell the client, in the way that is left; nothing is told to a client that went away."""
        if isinstance(error, Cancelled):
            return
        if not self._started:
            await self.whole(error.status, shown(error, self.path), retry_headers(error.status, error.retry_after))
        elif self._failing is not None:
            await self.write(self._failing(error), more=False)

    def over(self) -> None:
        """All is told: what told it is not held any longer."""
        self._failing = None

    async def _start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self._started = True
        pairs = [(b"content-type", media_type.encode())]
        pairs += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in {**headers, **self.more()}.items()
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})


class Finishing(Protocol):
    """An answer of which only the last bytes are still to be sent."""

    async def finish(self, responder: Responder) -> None: ...
