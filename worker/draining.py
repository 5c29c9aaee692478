"""Last step of a drain: waits until running requests end or move, then drops the rest for routers to recover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.protocol.errors import Draining

log = logging.getLogger("kvferry.worker")

CHECK_S = 0.05
"""Seconds between two checks of whether requests still run."""
DROP_TIMEOUT_S = 1.0
"""Maximum time for the engine to drop its requests, in seconds, since its step may hang."""


async def finish_requests(engine: EngineLoop, busy: Callable[[], bool], may_wait: Callable[[], bool]) -> None:
    """Wait while the node is busy and `may_wait` returns true; then drop the remaining requests.

    Their routers are notified before the node leaves the cluster, and recover the requests on other nodes. They would
    otherwise take the end of the process for a crash, and suspect its requests of having caused it."""
    while busy() and may_wait():  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(CHECK_S)
    if not busy():
        return
    loop = asyncio.get_running_loop()
    dropped: asyncio.Future[int] = loop.create_future()

    def report(count: int) -> None:
        if not dropped.done():
            dropped.set_result(count)

    def drop(engine: Engine) -> None:
        loop.call_soon_threadsafe(report, _drop_all(engine))

    engine.abort_all(drop)
    await asyncio.wait({dropped}, timeout=DROP_TIMEOUT_S)
    count = dropped.result() if dropped.done() else "all"
    dropped.cancel()
    why = "did not end or move within --drain-timeout" if not may_wait() else "are left"
    log.warning("%s request%s %s: routers recover them on other nodes", count, "" if count == 1 else "s", why)


def _drop_all(engine: Engine) -> int:
    """Drop every request, on the engine thread; return how many there were."""
    requests = list(engine.request_table)
    for request in requests:
        engine.stepper.drop(request, Draining("the node ends before the request could end or move"))
    return len(requests)
