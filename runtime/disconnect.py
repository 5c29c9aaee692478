"""Detection of client disconnects, and cancellation of the work for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from kvferry.protocol.errors import Cancelled

AGAIN_S = 0.1
"""Until work that ignored a cancellation is cancelled again."""

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; raises Cancelled then.

    The request's body must have been read. The work is done by the task that waits for it: one of its own would cost as
    much again as the one that looks for the client."""
    leaving = _Leaving(asyncio.ensure_future(disconnected(receive)))
    try:
        result = await work
    except BaseException:
        if leaving.over():
            raise Cancelled("the client went away") from None
        raise
    if leaving.over():
        raise Cancelled("the client went away")
    return result


class _Leaving:
    """Cancels the task that makes it once `client` is done, until `over`, again and again: a library below may swallow
    a cancellation (asyncio.wait_for did before Python 3.12), and work that nobody waits for any more would run on to
    its last token."""

    def __init__(self, client: asyncio.Future[None]) -> None:
        task = asyncio.current_task()
        assert task
        self._client, self._task, self._cancels, self._over = client, task, 0, False
        self._timer: asyncio.TimerHandle | None = None
        client.add_done_callback(self._left)

    def over(self) -> bool:
        """The work ended. Whether its task was cancelled for the client's sake, and for nothing else."""
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
