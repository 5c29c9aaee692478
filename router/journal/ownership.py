"""Runs a call that takes ownership of a journal, and releases the journal if the caller is cancelled meanwhile.

Otherwise other routers would follow the journal until it expires, because its owner lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvferry.protocol.errors import RegistryUnavailable

T = TypeVar("T")

_RELEASES: set[asyncio.Task[None]] = set()


async def owning(call: Coroutine[Any, Any, T], release: Callable[[], Awaitable[object]]) -> T:
    """Return the result of a call that may take ownership of a journal.

    If the call fails, or its caller is cancelled, `release` is called once the call has ended."""
    owned_call = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(owned_call)
    except BaseException:
        task = asyncio.create_task(_release_after(owned_call, release))
        _RELEASES.add(task)
        task.add_done_callback(_RELEASES.discard)
        raise


async def _release_after(owned_call: asyncio.Future[Any], release: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait([owned_call])
    if not owned_call.cancelled():
        owned_call.exception()  # retrieved, so that asyncio does not log it
    with contextlib.suppress(RegistryUnavailable):
        await release()
