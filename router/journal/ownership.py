"""Runs a call that takes ownership of a journal, and gives it up if the caller is cancelled meanwhile.

Other routers would follow such a journal until it expires, because its owner lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvferry.protocol.errors import RegistryUnavailable

T = TypeVar("T")

_GIVING_UP: set[asyncio.Task[None]] = set()


async def owning(call: Coroutine[Any, Any, T], give_up: Callable[[], Awaitable[object]]) -> T:
    """Return the result of a call that may own a journal.

    If the call fails, or its caller is cancelled, `give_up` is called once the call has ended."""
    taking = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(taking)
    except BaseException:
        task = asyncio.create_task(_given_up(taking, give_up))
        _GIVING_UP.add(task)
        task.add_done_callback(_GIVING_UP.discard)
        raise


async def _given_up(taking: asyncio.Future[Any], give_up: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait([taking])
    if not taking.cancelled():
        taking.exception()  # the caller has it, or is gone
    with contextlib.suppress(RegistryUnavailable):
        await give_up()
