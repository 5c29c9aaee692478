"""How a response learns that its reader went away, and what becomes of the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from protocol.errors import Cancelled

AGAIN_S = 0.1
"""Until work that ignored a cancellation is cancelled again."""

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; raises Cancelled then. The request's body
    must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        leaving.cancel()
        await _ended(working)


async def _ended(work: asyncio.Future[T]) -> None:
    """Cancel until it ends: a library below may swallow a cancellation (asyncio.wait_for did before Python 3.12), and
    work that nobody waits for any more would run on to its last token."""
    while not work.done():
        work.cancel()
        await asyncio.wait((work,), timeout=AGAIN_S)
    if not work.cancelled():
        work.exception()
