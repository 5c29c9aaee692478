"""Detection of client disconnects, and cancellation of the work for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from kvferry.protocol.errors import Cancelled

AGAIN_S = 0.1
"""Delay before work that ignored a cancellation is cancelled again, in seconds."""

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. The caller must have read the request's body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it and raise Cancelled.

    The caller must have read the request's body. The calling task awaits `work` itself: a second task would cost as
    much as the one that watches the client."""
    leaving = _Leaving(asyncio.ensure_future(disconnected(receive)))
    try:
        result = await work
    except BaseException:
        if leaving.over():
            raise Cancelled("the client disconnected") from None
        raise
    if leaving.over():
        raise Cancelled("the client disconnected")
    return result


class _Leaving:
    """Canceller of the task that creates it, active once `client` is done.

    It repeats the cancellation until `over`: a library may swallow one (asyncio.wait_for did before Python 3.12), and
    the work would then run to its last token without a reader."""

    def __init__(self, client: asyncio.Future[None]) -> None:
        task = asyncio.current_task()
        assert task
        self._client, self._task, self._cancels, self._over = client, task, 0, False
        self._timer: asyncio.TimerHandle | None = None
        client.add_done_callback(self._left)

    def over(self) -> bool:
        """Stop cancelling; return whether the disconnect was the only reason for which the task was cancelled."""
        self._over = True
        self._client.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(self._cancels):
            self._task.uncancel()
        return self._cancels > 0 and not self._task.cancelling()

    def _left(self, client: asyncio.Future[None]) -> None:
        if self._over or client.cancelled():
            return
        self._cancels += 1
        self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._left, client)
