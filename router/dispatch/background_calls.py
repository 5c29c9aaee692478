"""Fire-and-forget calls to nodes, such as cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundCalls:
    """Calls that nobody waits for (cancels, tails of answers). Held here so that they run to their end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def bound(self, task: asyncio.Task[None], limit_s: float) -> None:
        """Let the call go on for so long."""
        if not task.done():
            timer = asyncio.get_running_loop().call_later(limit_s, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    @property
    def open(self) -> int:
        return len(self._tasks)

    async def finish(self, limit_s: float) -> None:
        """Wait for all, then drop the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
