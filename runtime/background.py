"""Background asyncio tasks that run during a `with` block and are cancelled at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds after which a task that has not ended is cancelled again."""


@asynccontextmanager
async def background(run: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run the coroutine as an asyncio task until the end of the block.

    If it fails earlier, the failure is logged at once, and the end of the block raises its exception."""
    task = asyncio.create_task(run, name=name)
    task.add_done_callback(_report)
    try:
        yield
    finally:
        await end(task)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended; raise its exception if it failed.

    A task may miss a cancellation, and is then cancelled again: before Python 3.12 `asyncio.wait_for`, which the Redis
    client uses for writes, drops a cancellation that arrives just as it completes."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=RETRY_S)
    with suppress(asyncio.CancelledError):
        await task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("background task %s has failed", task.get_name(), exc_info=error)
