"""Rows of batches ask the router's own application as clients do that never leave."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from kvferry.router.batch.internal_client import ask
from kvferry.router.request_context import RequestContext


async def test_any_number_of_watches_find_that_nobody_leaves() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        for _ in range(3):
            watch = asyncio.ensure_future(receive())
            assert not (await asyncio.wait([watch], timeout=0.01))[0]
            watch.cancel()
            await asyncio.wait([watch])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"A", b"b")]})
        await send({"type": "http.response.body", "body": body[:1], "more_body": True})
        await send({"type": "http.response.body", "body": body[1:]})

    assert await ask(app, "/", RequestContext("a", 0.0, 0.0), b'{"a": 1}') == (200, {"a": "b"}, {"a": 1})
