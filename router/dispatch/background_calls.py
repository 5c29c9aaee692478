"""BackgroundCalls: keeps track of node calls that no task awaits, such as cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvferry.runtime.eager_start import start_eagerly


class BackgroundCalls:
    """Calls that no task awaits, such as cancels and tails of answers; references are kept so that they complete."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a call and return its task."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def send_now(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the first step of a call now and the rest as `send` does, so that its data is sent at once.

        The call may use its task only after its first await."""
        return self.send(start_eagerly(call) or _nothing())

    def limit(self, task: asyncio.Task[None], limit_s: float) -> None:
        """Cancel the task if it still runs after `limit_s` seconds."""
        if not task.done():
            timer = asyncio.get_running_loop().call_later(limit_s, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    @property
    def open(self) -> int:
        """Return the number of running calls."""
        return len(self._tasks)

    async def finish(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for all calls, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def _nothing() -> None:
    """Do nothing: the call ended in its first step."""
