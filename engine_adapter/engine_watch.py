"""Watch over an engine server: its health, its load, and whether it is still the same process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvferry.engine_adapter.engine import Engine, EngineLoad
from kvferry.protocol.errors import KvferryError, NodeDown

log = logging.getLogger("kvferry.adapter")

HEALTH_S, LOAD_S = 0.4, 1.0
"""Seconds between two checks of the engine's health and of its load."""
STALLED_S = 1.0
"""Seconds without an answer after which the engine counts as stalled."""
GONE_S = 15.0
"""Seconds without an answer after which the engine counts as gone."""


class EngineWatch:
    """Watches an engine until it ends. fault: why it counts as gone; `gone` is set then.

    last_output_at: returns when output came last, in monotonic seconds: an engine too busy to answer is not gone."""

    def __init__(self, engine: Engine, process: str, last_output_at: Callable[[], float] = lambda: 0.0) -> None:
        self._engine, self._process, self._last_output_at = engine, process, last_output_at
        self.load = EngineLoad()
        self.fault = ""
        self.gone = asyncio.Event()
        self._answered_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def still_s(self) -> float:
        """Return the seconds since the engine's last answer, if it is stalled; 0 if it is well."""
        return self._unanswered_s if self._unanswered_s > STALLED_S else 0.0

    @property
    def _unanswered_s(self) -> float:
        return time.monotonic() - max(self._answered_at, self._last_output_at())

    def use_output_clock(self, last_output_at: Callable[[], float]) -> None:
        """Use this function from now on as `last_output_at`."""
        self._last_output_at = last_output_at

    def start(self) -> None:
        """Begin to watch, also after a stop."""
        self._answered_at = time.monotonic()
        self._task = asyncio.create_task(self._watch(), name="engine-watch")

    def stop(self) -> None:
        """End the watch."""
        if self._task is not None:
            self._task.cancel()

    async def confirm(self, error: KvferryError) -> None:
        """Return once the engine is known to be well after this error. Does not return if it is gone."""
        try:
            await self._check()
        except KvferryError as found:
            log.info("after %s: %s", error.message, found.message)
        if self.fault:
            await asyncio.Event().wait()

    async def _watch(self) -> None:
        load_at = 0.0
        while not self.fault:
            try:
                await self._check()
                if (now := time.monotonic()) >= load_at:
                    self.load, load_at = await self._engine.load(), now + LOAD_S
                    if self.load.process != self._process:
                        self.end("it is another process now")
            except KvferryError as error:
                log.debug("the engine does not answer: %s", error)
            except Exception as error:
                log.exception("the engine's state cannot be read")
                self.end(f"its state cannot be read: {type(error).__name__}")
            await asyncio.sleep(HEALTH_S)

    async def _check(self) -> None:
        try:
            await self._engine.health()
        except NodeDown as error:
            self.end(error.message)
            raise
        except KvferryError:
            if self._unanswered_s > GONE_S:
                self.end(f"it has not answered for {GONE_S:g} s")
            raise
        self._answered_at = time.monotonic()

    def end(self, why: str) -> None:
        """Count the engine as gone."""
        if not self.fault:
            self.fault = why
            self.gone.set()
