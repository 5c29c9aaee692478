"""End of a drain: running requests finish or move within a period, and the rest is left to other nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.protocol.errors import Draining

log = logging.getLogger("kvferry.worker")

LOOK_S = 0.05
"""Seconds between two checks whether requests still run."""
GIVE_UP_S = 1.0
"""Limit in seconds for the engine to give up its requests, since its step may hang."""


async def finish_requests(engine: EngineLoop, busy: Callable[[], bool], may_wait: Callable[[], bool]) -> None:
    """Wait while the node is busy and `may_wait` returns true; then give up the requests that are left.

    Their routers learn of it before the node leaves, and recover them on other nodes. They would otherwise take the
    end of the process for its death, and suspect its requests of having caused it."""
    while busy() and may_wait():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK_S)
    if not busy():
        return
    loop = asyncio.get_running_loop()
    given_up: asyncio.Future[int] = loop.create_future()

    def told(count: int) -> None:
        if not given_up.done():
            given_up.set_result(count)

    def drop(engine: Engine) -> None:
        loop.call_soon_threadsafe(told, _drop_all(engine))

    engine.give_up(drop)
    await asyncio.wait({given_up}, timeout=GIVE_UP_S)
    count = given_up.result() if given_up.done() else "all"
    given_up.cancel()
    why = "did not end or move within --drain-timeout" if not may_wait() else "are left"
    log.warning("%s request%s %s: routers recover them on other nodes", count, "" if count == 1 else "s", why)


def _drop_all(engine: Engine) -> int:
    """Drop every request, on the engine thread; return how many there were."""
    requests = list(engine.request_table)
    for request in requests:
        engine.stepper.drop(request, Draining("the node ends before the request could end or move"))
    return len(requests)
