"""The standing token streams: one per router, one frame per engine step for all requests of that router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from protocol.messages import StepFrame

HEARTBEAT_S = 0.5
MAX_QUEUED_FRAMES = 4096
"""A reader this far behind is taken for gone."""


class RouterStreams:
    """Open streams by router id. A router's newest stream replaces its older one. Owned by the asyncio loop.

    on_lost(router_id): the router has no stream any more; whatever runs for it has no reader.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._queues: dict[str, asyncio.Queue[StepFrame | None]] = {}

    def open(self, router_id: str) -> asyncio.Queue[StepFrame | None]:
        """Begin a stream; the older one of the same router ends."""
        older = self._queues.get(router_id)
        if older is not None:
            older.put_nowait(None)
        queue = self._queues[router_id] = asyncio.Queue()
        self._beat(router_id, queue)
        return queue

    def close(self, router_id: str, queue: asyncio.Queue[StepFrame | None]) -> None:
        """The stream's reader went away."""
        if self._queues.get(router_id) is queue:
            del self._queues[router_id]
            self._on_lost(router_id)

    def publish(self, router_id: str, frame: StepFrame) -> None:
        """Queue one frame for a router; without a reader its requests are given up."""
        queue = self._queues.get(router_id)
        if queue is None:
            self._on_lost(router_id)
        elif queue.qsize() >= MAX_QUEUED_FRAMES:
            queue.put_nowait(None)
            self.close(router_id, queue)
        else:
            queue.put_nowait(frame)

    def _beat(self, router_id: str, queue: asyncio.Queue[StepFrame | None]) -> None:
        """An empty frame now and then tells the reader that the node lives."""
        if self._queues.get(router_id) is queue:
            if queue.empty():
                queue.put_nowait(StepFrame())
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat, router_id, queue)

    def stop(self) -> None:
        """End every stream after what is queued."""
        for queue in self._queues.values():
            queue.put_nowait(None)
        self._queues.clear()


async def frames(queue: asyncio.Queue[StepFrame | None]) -> AsyncIterator[StepFrame]:
    """Frames of a stream until it ends."""
    while (frame := await queue.get()) is not None:
        yield frame
