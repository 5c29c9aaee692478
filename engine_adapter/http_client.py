"""HTTP client of one engine server: JSON in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json

from kvferry.engine_adapter.engine_errors import refusal
from kvferry.protocol.errors import (
    ConfigError,
    NodeDown,
    NodeLost,
    Overloaded,
    StepFailed,
)
from kvferry.runtime.http_connection import Connection, Decoder
from kvferry.runtime.tls import PLAIN

log = logging.getLogger("kvferry.adapter")

CONNECT_S, ANSWER_S = 2.0, 10.0
"""Maximum time to connect, and to wait for a short answer, in seconds."""
HEALTH_S = 2.0
"""Maximum time to wait for a health check, in seconds."""
MAX_IDLE = 64
"""Maximum number of idle connections."""
LARGE_BYTES = 2**20
"""Length in bytes from which an answer is read by a parser that is faster for long texts."""
MAX_EVENT_BYTES = 64 * 2**20
"""Maximum size of an event or answer, in bytes."""


class EventDecoder:
    """Decoder of server-sent events: the data of each event, without the final [DONE]."""

    is_empty = False
    """Each answer has one of its own."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._length = 0

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Return the data of the events that are complete now. Raises ValueError for one that is too long."""
        if not self._length and data.endswith(b"\n\n") and data.startswith(b"data: {") and data.count(b"\n") == 2:
            return (data[6:-2],)  # one whole event, which is how most tokens come
        self._length += len(data)
        if self._length > MAX_EVENT_BYTES:
            raise ValueError("an event is too long")
        self._rest.append(data)
        if b"\n" not in data:
            return ()
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest, self._length = [rest], len(rest)
        found = (line[5:].strip() for line in lines if line.startswith(b"data:"))
        return [each for each in found if each and each != b"[DONE]"]


class WholeBody:
    """Decoder of an answer that is no stream: its parts as they come."""

    is_empty = False
    """Each answer has one of its own."""

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Return the bytes."""
        return (data,)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request. begun: called with the answer's content type before `deliver`."""

    request: bytes
    silence_s: float | None
    deliver: Callable[..., None]
    begun: Callable[[str], None]

    async def on(self, connection: Connection) -> None:
        """Send it and deliver the answer."""
        opened = partial(self._opened, connection)
        await connection.exchange((self.request,), self.silence_s, opened, self.deliver)

    async def answered(self, connection: Connection) -> bool:
        """Send it on a connection that was idle; return False if the server had closed it just before.

        A server may close one at any time, as llama.cpp's does after each stream, although it promises to keep it."""
        try:
            await self.on(connection)
        except ConnectionError:
            if connection.answered:
                raise
            return False
        return True

    def _opened(self, connection: Connection) -> None:
        self.begun(connection.headers.get("content-type", ""))


class EngineHttp:
    """Calls to one engine server at `url`.

    Every call raises NodeDown if the connection breaks or is refused, NodeLost if the server does not answer, and the
    error of `refusal` if it refuses. A cancelled call closes its connection. api_key: returns the key that is sent as a
    bearer token, read for each call; empty: none."""

    def __init__(self, url: str, api_key: Callable[[], str] = str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be http://host:port of the engine, got {url!r}", param="url")
        self.url, self.host = url.rstrip("/"), parts.hostname
        self._path, self._netloc = parts.path.rstrip("/"), parts.netloc
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._encrypted = PLAIN.options(parts)
        self._api_key = api_key
        self._idle: dict[type, list[Connection]] = {EventDecoder: [], WholeBody: []}

    async def stream(self, path: str, body: Any, deliver: Callable[[dict[str, Any]], None]) -> None:
        """POST a JSON body and deliver each event of the answer. Without a limit on silence."""

        await self._call(f"POST {self._path}{path}", body, EventDecoder, None, lambda data: deliver(_event(data)))

    async def upload(
        self,
        path: str,
        body: bytes,
        content_type: str,
        begun: Callable[[str], None],
        deliver: Callable[[bytes], None],
    ) -> None:
        """POST a body and deliver the answer's bytes as they come, after `begun` with the answer's content type."""
        what = f"POST {self._path}{path}"
        await self._call(what, body, WholeBody, None, deliver, content_type=content_type, begun=begun)

    async def post(self, path: str, body: Any, silence_s: float | None = ANSWER_S) -> Any:
        """POST a body, or its JSON, and return the JSON of the answer; None if it is empty."""
        return _json(await self._whole(f"POST {self._path}{path}", body, silence_s))

    async def get(self, path: str, silence_s: float = ANSWER_S) -> Any:
        """Return the JSON of a path."""
        return _json(await self._whole(f"GET {self._path}{path}", b"", silence_s))

    async def text(self, path: str, silence_s: float = ANSWER_S) -> str:
        """Return the text of a path."""
        return (await self._whole(f"GET {self._path}{path}", b"", silence_s)).decode("utf-8", "replace")

    async def health(self) -> None:
        """Return if GET /health succeeds. Raises NodeDown if the server reports that it is not well."""
        try:
            await self.text("/health", HEALTH_S)
        except (Overloaded, StepFailed) as error:
            raise NodeDown(f"the engine reports that it is unhealthy: {error.message}") from error

    async def close(self) -> None:
        """Close the idle connections."""
        for idle in self._idle.values():
            for connection in list(idle):
                connection.close()

    async def _whole(self, what: str, body: Any, silence_s: float | None) -> bytes:
        parts: list[bytes] = []
        await self._call(what, body, WholeBody, silence_s, parts.append)
        return b"".join(parts)

    async def _call(
        self,
        what: str,
        body: Any,
        decoder: type[Decoder],
        silence_s: float | None,
        deliver: Callable[..., None],
        *,
        content_type: str = "application/json",
        begun: Callable[[str], None] = lambda kind: None,
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        key = f"authorization: Bearer {secret}\r\n" if (secret := self._api_key()) else ""
        head = (
            f"{what} HTTP/1.1\r\nhost: {self._netloc}\r\n{key}content-type: {content_type}\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        exchange = _Exchange(head.encode() + data, silence_s, deliver, begun)
        try:
            connection = self._idle_connection(decoder)
            if connection is None or not await exchange.answered(connection):
                connection = await self._connection(decoder)
                await exchange.on(connection)
        except ConnectionError as error:
            raise NodeDown(f"the engine at {self.url}: {type(error).__name__} {error}".strip()) from error
        except (OSError, httptools.HttpParserError, ValueError) as error:
            raise NodeLost(f"the engine at {self.url}: {type(error).__name__} {error}".strip()) from error
        self._rest(decoder, connection)

    def _idle_connection(self, decoder: type[Decoder]) -> Connection | None:
        while idle := self._idle[decoder]:
            if (connection := idle[-1]).wake():
                return connection
        return None

    async def _connection(self, decoder: type[Decoder]) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(decoder, refusal), *self._address, **self._encrypted
            )
        return connection

    def _rest(self, decoder: type[Decoder], connection: Connection) -> None:
        idle = self._idle[decoder]
        idle.append(connection)
        connection.rest(lambda: idle.remove(connection))
        if len(idle) > MAX_IDLE:
            idle[0].close()


def _event(data: bytes) -> Any:
    """Return the JSON of an event. The fast parser rejects halves of surrogate pairs, which texts may be cut into."""
    try:
        return from_json(data)
    except ValueError:
        return json.loads(data)


def _json(data: bytes) -> Any:
    try:
        if len(data) > LARGE_BYTES:
            return from_json(data)
        return json.loads(data) if data else None
    except ValueError as error:
        raise NodeLost(f"the engine's answer is not JSON: {error}") from error
