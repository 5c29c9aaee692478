"""The load generator: streamed completions of token-id prompts, timed as a client sees them, the same for every server.

It shares its cores with what it measures, so while a stream runs it only splits lines and reads the clock; JSON is
decoded after the last byte.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

VOCABULARY = range(1000, 40000)
"""Plain words in the vocabularies of today's models: no control tokens."""

TIMEOUT_S = 600.0


class LoadError(Exception):
    """A server refused a request, broke off, or sent another number of tokens than asked for."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. url: without `/v1`; model: the name to ask it for."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed completion. Times are seconds of one clock; `arrivals`: when each event with output came, which may
    carry more than one token; `tokens`: output tokens by the server's own count."""

    began: float
    arrivals: tuple[float, ...]
    tokens: int

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.began

    @property
    def rate(self) -> float:
        """Output tokens per second after the first token."""
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])


def random_prompt(source: random.Random, count: int) -> list[int]:
    return source.choices(VOCABULARY, k=count)


async def complete(target: Target, prompt: Sequence[int], max_tokens: int) -> Completion:
    """Stream one greedy completion of exactly `max_tokens` tokens. Raises LoadError."""
    address = urlsplit(target.url)
    request = _request(address.netloc, target.model, prompt, max_tokens)
    began = time.perf_counter()
    try:
        transport, exchange = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(request), address.hostname or "127.0.0.1", address.port or 80
        )
        try:
            await asyncio.wait_for(exchange.done, TIMEOUT_S)
        finally:
            transport.close()
    except (OSError, httptools.HttpParserError) as error:
        raise LoadError(f"{target.url}: {error or type(error).__name__}") from error
    return parse(began, exchange.events, max_tokens)


def parse(began: float, events: Sequence[tuple[float, bytes]], max_tokens: int) -> Completion:
    """From (time, JSON) of a stream's events. An event without text, as one that only tells why the stream ended, is no
    arrival. Raises LoadError."""
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


def _request(host: str, model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class _Exchange(asyncio.Protocol):
    """One request and its response. `events`: (arrival, JSON) of each `data:` line."""

    def __init__(self, request: bytes) -> None:
        self.events: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        self.events += [(self._now, line[6:]) for line in lines if line.startswith(b"data: {")]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 200:
            self._end(None)
        else:
            self._end(LoadError(f"status {status}: {self._rest.decode(errors='replace')[:300]}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LoadError(f"the server closed the connection ({exc})"))

    def _end(self, error: LoadError | None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
