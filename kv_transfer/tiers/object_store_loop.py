"""Thread with its own asyncio loop for calls to the shared object store; a hanging call does not delay process exit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

log = logging.getLogger("kvferry.tiers")


class StoreLoop:
    """asyncio loop on a daemon thread. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._kept: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, task: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine on the loop and log its errors; do nothing after `close`."""
        try:
            self._loop.call_soon_threadsafe(self._begin, task)
        except RuntimeError:
            task.close()

    def close(self) -> None:
        """Cancel all calls and end the thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in self._kept:
                task.cancel()
            if self._kept:
                self._loop.run_until_complete(asyncio.wait(self._kept, timeout=1.0))
        finally:
            self._loop.close()

    def _begin(self, task: Coroutine[Any, Any, None]) -> None:
        begun = self._loop.create_task(task)
        self._kept.add(begun)
        begun.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call to a store failed", exc_info=error)
