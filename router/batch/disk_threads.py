"""Thread pool for blocking disk calls on clients' files, with a limit for each tenant.

A call may hang, for example on a network file system. It then counts against its tenant's limit, but calls of
other tenants, the dashboard and the reload of keys do not wait for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvferry.router.batch.files import DiskFailed

THREADS, PER_TENANT = 64, 4
"""Number of threads, and maximum number of concurrent calls of one tenant."""
QUEUE_S = 10.0
"""Longest wait of a call for its tenant's other calls, in seconds."""
CALL_LIMIT_S = 300.0
"""Longest wait for a call, in seconds; enough to copy a file of the largest upload."""
P = ParamSpec("P")
R = TypeVar("R")

_threads = ThreadPoolExecutor(THREADS, "disk")
_limits: weakref.WeakValueDictionary[tuple[int, str], asyncio.Semaphore] = weakref.WeakValueDictionary()


async def on_disk(tenant: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking call on a tenant's files. Raises what it raises, and DiskFailed if the disk does not answer."""
    loop = asyncio.get_running_loop()
    limit = _limits.setdefault((id(loop), tenant), asyncio.Semaphore(PER_TENANT))
    try:
        async with asyncio.timeout(QUEUE_S):
            await limit.acquire()
    except TimeoutError:
        raise DiskFailed("the data directory does not answer; other calls of this tenant wait for it") from None
    running = loop.run_in_executor(_threads, lambda: call(*args, **kwargs))
    running.add_done_callback(lambda _: limit.release())
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            return await asyncio.shield(running)
    except TimeoutError:
        if running.done():
            raise
        raise DiskFailed("the data directory does not answer") from None
