"""A node's HTTP side without a server: requests come off a wire, handlers of the real services answer them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvferry.protocol.errors import KvferryError
from kvferry.worker.message_stream import MessageStreamResponse
from tests.virtual.clock import Process
from tests.virtual.wires import End


class Routes:
    """Takes endpoints as an app does."""

    def __init__(self) -> None:
        self._known: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []

    def get(self, path: str) -> Callable[[Any], Any]:
        return lambda handler: self._known.append(("GET", _pattern(path), handler))

    def post(self, path: str, status_code: int = 200) -> Callable[[Any], Any]:
        return lambda handler: self._known.append(("POST", _pattern(path), handler))

    async def answer(self, method: str, target: str, request: Asked) -> Any:
        url = urlsplit(target)
        for known, pattern, handler in self._known:
            if known == method and (found := pattern.fullmatch(url.path)):
                asked = {name: int(value) for name, value in parse_qsl(url.query)}
                return await handler(**found.groupdict(), **asked, **({} if method == "GET" else {"request": request}))
        raise AssertionError(f"nobody answers {method} {target}")


class Served:
    """One connection that was accepted: an asyncio protocol."""

    def __init__(self, process: Process, routes: Routes) -> None:
        self._process, self._routes = process, routes
        self._data = b""
        self._gone = asyncio.Event()

    def connection_made(self, end: End) -> None:
        self._end = end

    def data_received(self, data: bytes) -> None:
        """Requests come whole, one at a time."""
        head, _, body = data.partition(b"\r\n\r\n")
        method, target, _ = head.decode().split("\r\n")[0].split(" ")
        self._process.task(self._answer(method, target, body))

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set()

    async def _answer(self, method: str, target: str, body: bytes) -> None:
        try:
            response = await self._routes.answer(method, target, Asked(body, self._gone))
        except KvferryError as error:
            self._whole(error.status, json.dumps(error.body()).encode(), error.retry_after)
            return
        if response is None:
            self._whole(202, b"")
            return
        assert isinstance(response, MessageStreamResponse)
        await response({}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._end.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        elif message["body"]:
            self._end.write(b"%x\r\n%s\r\n" % (len(message["body"]), message["body"]))
        else:
            self._end.write(b"0\r\n\r\n")

    def _whole(self, status: int, body: bytes, retry_after: float | None = None) -> None:
        later = f"retry-after: {retry_after}\r\n" if retry_after is not None else ""
        head = f"HTTP/1.1 {status} as said\r\ncontent-length: {len(body)}\r\n{later}\r\n"
        self._end.write(head.encode() + body)


class Asked:
    """What a handler reads of a request."""

    def __init__(self, body: bytes, gone: asyncio.Event) -> None:
        self._body, self._gone = body, gone

    async def stream(self) -> Any:
        yield self._body

    async def is_disconnected(self) -> bool:
        return self._gone.is_set()


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
