"""Cancellation of the work for an HTTP request as soon as its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from kvferry.protocol.errors import Cancelled
from kvferry.runtime.response_cycle import ResponseCycle

RETRY_S = 0.1
"""Delay before work that ignored a cancellation is cancelled again, in seconds."""

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. The caller must have read the request's body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it and raise Cancelled.

    The caller must have read the request's body. The calling task itself awaits `work`, to save the cost of a second
    task. A `ResponseCycle` reports the disconnect without a task."""
    canceller = _Canceller()
    cycle = getattr(receive, "__self__", None)
    unwatch: Callable[[], object]
    if isinstance(cycle, ResponseCycle):
        unwatch = cycle.watch(canceller.cancel_task)
    else:
        watch = asyncio.ensure_future(disconnected(receive))
        watch.add_done_callback(canceller.watch_ended)
        unwatch = watch.cancel
    try:
        result = await work
    except BaseException:
        if canceller.stop():
            raise Cancelled("the client disconnected") from None
        raise
    finally:
        unwatch()
    if canceller.stop():
        raise Cancelled("the client disconnected")
    return result


class _Canceller:
    """Canceller of the task that creates it, active once the client has left.

    It repeats the cancellation until `stop`: a library may swallow one (asyncio.wait_for did before Python 3.12), and
    the work would then run to its last token without a reader."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task, self._cancels, self._stopped = task, 0, False
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> bool:
        """Stop cancelling; return whether the disconnect was the only reason for the task's cancellation."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(self._cancels):
            self._task.uncancel()
        return self._cancels > 0 and not self._task.cancelling()

    def cancel_task(self) -> None:
        """Cancel the task, and again after RETRY_S: the client has left."""
        if self._stopped:
            return
        self._cancels += 1
        self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(RETRY_S, self.cancel_task)

    def watch_ended(self, client: asyncio.Future[None]) -> None:
        """Cancel the task unless the watch of the client was cancelled."""
        if not client.cancelled():
            self.cancel_task()
