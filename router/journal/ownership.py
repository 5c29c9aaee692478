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


async def owning(
    call: Coroutine[Any, Any, T], release: Callable[[], Awaitable[object]], *, keeps: type[Exception] | None = None
) -> T:
    """Return the result of a call that may take ownership of a journal.

    If the call fails, or its caller is cancelled, `release` is called once the call has ended; but not after an error
    of the type `keeps`, after which the caller takes the ownership later or calls `release_soon`."""
    owned_call = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(owned_call)
    except BaseException as error:
        if keeps is None or not isinstance(error, keeps):
            _start(_release_after(owned_call, release))
        raise


def release_soon(release: Callable[[], Awaitable[object]]) -> None:
    """Release a journal that a failed call may have opened."""
    _start(_release(release))


def _start(releasing: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(releasing)
    _RELEASES.add(task)
    task.add_done_callback(_RELEASES.discard)


async def _release_after(owned_call: asyncio.Future[Any], release: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait([owned_call])
    if not owned_call.cancelled():
        owned_call.exception()  # retrieved, so that asyncio does not log it
    await _release(release)


async def _release(release: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(RegistryUnavailable):
        await release()
