"""CoreTurns: the engine holds shared CPU cores while it computes, and hands them over between a prompt's layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvferry.engine.models.base import KeepGoing

MAX_WAIT_S = 0.25
"""Longest wait for the cores: their holder may be stopped, or compute something that cannot be interrupted."""
MIN_TURN_S = 0.005
"""Shortest turn: handing the cores over takes a part of a millisecond."""


class SharedCores(Protocol):
    """Lock on shared cores: see `engine.shared_cores.core_lock`."""

    def acquire(self, within_s: float) -> bool:
        """Take the cores; return False if they were not free in time."""

    def release(self) -> None:
        """Release the cores."""

    def contended(self) -> bool:
        """Return whether another process waits for the cores."""

    def mark_urgent(self) -> None:
        """Mark this process's waiting work as urgent."""

    def clear_urgent(self) -> None:
        """Clear the urgent mark."""

    def is_urgent(self) -> bool:
        """Return whether another process's waiting work is urgent."""


class CoreTurns:
    """Turns of one engine on shared cores; without a lock the cores are always its own.

    A step with streams or of a short prompt takes milliseconds and is not interrupted. A longer step keeps the cores
    for `turn_s` seconds, less the time for which other processes kept them before: their streams get a token in every
    `turn_s`. Urgent work elsewhere gets them sooner. waited_s: seconds of the last step without the cores."""

    def __init__(
        self, cores: SharedCores | None = None, turn_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cores, self._turn_s, self._clock = cores, turn_s, clock
        self._max_wait_s = MAX_WAIT_S
        self._holds = self._urgent = False
        self._since = self._waited_s = self.waited_s = 0.0

    def mark_urgent(self) -> None:
        """Announce urgent work of this engine, so that it gets the cores soon. Thread-safe."""
        if self._cores is not None:
            self._cores.mark_urgent()

    @contextmanager
    def computing(self, keep_going: KeepGoing, *, whole: bool = False, urgent: bool = False) -> Iterator[KeepGoing]:
        """Hold the cores inside the context.

        whole: without interruption; urgent: other processes should not make it wait. Yields a function to call between
        layers in place of `keep_going`."""
        if self._cores is None:
            yield keep_going
            return
        self._urgent, self.waited_s = urgent, 0.0
        self._acquire(self._cores)
        try:
            yield keep_going if whole else lambda: self._yield_if_due() and keep_going()
        finally:
            self._release()

    def _yield_if_due(self) -> bool:
        """Hand the cores to other processes if it is time to. Always return True."""
        if self._cores and self._holds and self._should_yield(self._cores, self._clock() - self._since):
            self._release()
            self._acquire(self._cores)
        return True

    def _should_yield(self, cores: SharedCores, held_s: float) -> bool:
        if held_s <= MIN_TURN_S:
            return False
        turn_over = held_s > self._turn_s - self._waited_s
        return (turn_over and cores.contended()) or (not self._urgent and cores.is_urgent())

    def _acquire(self, cores: SharedCores) -> None:
        """Take the cores; after a wait that timed out, do not wait again until they were free once."""
        began = self._clock()
        if self._urgent:
            cores.mark_urgent()
        self._holds = cores.acquire(self._max_wait_s)
        self._max_wait_s = MAX_WAIT_S if self._holds else 0.0
        if self._urgent:
            cores.clear_urgent()
        self._since = self._clock()
        self._waited_s = self._since - began
        self.waited_s += self._waited_s

    def _release(self) -> None:
        if self._cores and self._holds:
            self._holds = False
            self._cores.release()
