"""Load generator: streamed completions of token-id prompts, timed as a client sees them, the same for every server.

It shares its cores with the measured server, so while a stream runs it only splits lines and reads the clock; JSON is
decoded after the last byte."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

VOCABULARY = range(1000, 40000)
"""Plain words in the vocabularies of today's models: no control tokens."""

TIMEOUT_S = 600.0


class LoadError(Exception):
    """A server refused a request, closed the connection, or sent another number of tokens than requested."""


class Rejected(LoadError):
    """A server answered 429: the request came too soon for its limits or targets."""


@dataclass(frozen=True, slots=True)
class Target:
    """Server under load. url: without `/v1`; model: name to ask it for."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed completion, with times in seconds of one clock.

    arrivals: times of events with output, each of which may have more than one token; tokens: output tokens by the
    server's own count."""

    began: float
    arrivals: tuple[float, ...]
    tokens: int

    @property
    def first_s(self) -> float:
        """Return the time to first token, in seconds."""
        return self.arrivals[0] - self.began

    @property
    def rate(self) -> float:
        """Return the output tokens per second after the first token."""
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])


def random_prompt(source: random.Random, count: int) -> list[int]:
    return source.choices(VOCABULARY, k=count)


async def complete(target: Target, prompt: str | Sequence[int], max_tokens: int) -> Completion:
    """Stream one greedy completion of exactly `max_tokens` tokens on a connection of its own. Raises LoadError."""
    began = time.perf_counter()
    async with connected(target.url) as connection:
        return await connection.complete(target.model, prompt, max_tokens, began=began, last=True)


def parse(began: float, events: Sequence[tuple[float, bytes]], max_tokens: int) -> Completion:
    """Return the completion from (time, JSON) of a stream's events. Raises LoadError.

    An event without text, such as the one with the finish reason, is not an arrival."""
    arrivals, tokens = [], None
    for when, data in events:
        event = json.loads(data)
        if "error" in event:
            raise LoadError(str(event["error"]))
        if any(choice.get("text") for choice in event.get("choices") or ()):
            arrivals.append(when)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    if not arrivals:
        raise LoadError("a stream without text")
    if tokens != max_tokens:
        raise LoadError(f"{tokens} output tokens instead of {max_tokens}")
    return Completion(began, tuple(arrivals), tokens)


def _request(
    host: str, model: str, prompt: str | Sequence[int], max_tokens: int, seed: int | None, last: bool, key: str
) -> bytes:
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post(host, "/v1/completions", json.dumps(body).encode(), last=last, key=key)


def post(
    host: str, path: str, content: bytes, *, kind: str = "application/json", last: bool = False, key: str = ""
) -> bytes:
    """Return the bytes of a POST; the server closes the connection after the `last` one."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}{'Connection: close' if last else 'Connection: keep-alive'}\r\n\r\n".encode() + content


@asynccontextmanager
async def connected(url: str, key: str = "") -> AsyncIterator[Connection]:
    """Connect to a server until exit; completions present the API key. Raises LoadError."""
    address = urlsplit(url)
    try:
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(address.netloc, key), address.hostname or "127.0.0.1", address.port or 80
        )
        try:
            yield connection
        finally:
            transport.close()
    except (OSError, httptools.HttpParserError) as error:
        raise LoadError(f"{url}: {error or type(error).__name__}") from error


class Connection(asyncio.Protocol):
    """Connection with one request after another."""

    def __init__(self, host: str, key: str = "") -> None:
        self.host, self._key = host, key
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer.set_result(None)
        self._events: list[tuple[float, bytes]] = []
        self._rest, self._now = b"", 0.0

    async def complete(
        self,
        model: str,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        began: float = 0.0,
        last: bool = False,
    ) -> Completion:
        """Stream a completion as the function `complete` does; it is timed from `began`, or from now."""
        request = _request(self.host, model, prompt, max_tokens, seed, last, self._key)
        began = began or time.perf_counter()
        return parse(began, await self.send(request), max_tokens)

    async def send(self, request: bytes) -> list[tuple[float, bytes]]:
        """Return (arrival, JSON) of each `data:` line of the answer, once it is complete. Raises LoadError."""
        if self._transport.is_closing():
            raise LoadError("the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._events, self._rest = asyncio.get_running_loop().create_future(), [], b""
        self._transport.write(request)
        async with asyncio.timeout(TIMEOUT_S):  # not wait_for, which may lose a cancellation (CPython 3.11)
            await self._answer
        return self._events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(LoadError(f"no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        self._events += [(self._now, line[6:]) for line in lines if line.startswith(b"data: {")]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 300:
            self._end(None)
        else:
            kind = Rejected if status == 429 else LoadError
            self._end(kind(f"status {status}: {self._rest.decode(errors='replace')[:300]}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LoadError(f"the server closed the connection ({exc})"))

    def _end(self, error: LoadError | None) -> None:
        if self._answer.done():
            return
        if error:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(None)
