"""Sends a POST request to the router's own ASGI application in-process; batch rows are run this way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

from kvferry.router.request_context import CALL, RequestContext


async def ask(app: ASGIApp, path: str, call: RequestContext, body: bytes) -> tuple[int, dict[str, str], Any]:
    """POST a JSON body to the application; return the status, the lower-case headers and the JSON answer."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": None, "client": None,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], CALL: call,
    }  # fmt: skip
    bodies = [body]
    status, headers, parts = 500, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await asyncio.Future()  # nobody leaves

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, json.loads(b"".join(parts))
