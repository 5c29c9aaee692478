"""Pacing of the frames to routers, as network cards pace interrupts: tokens that come close together share a turn.

Each engine stream is a connection of its own. Where tokens come one at a time, waking up for each of them and writing a
frame of its own costs more than all else that an adapter does with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S = 1.5e-3
"""Shortest time between two frames, in seconds. A token of a stream that runs alone waits for at most this long."""


class FramePacing:
    """Calls `send` soon after `due`, on the asyncio loop, at most once in TURN_S.

    When the next frame is due too early, the loop itself sleeps, so that the sockets that become ready meanwhile are
    read in one turn. A timer instead would wake the process up once more. A loop that is busy for TURN_S never sleeps.
    """

    def __init__(
        self,
        send: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send, self._clock, self._sleep = send, clock, sleep
        self._sent_at = -TURN_S
        self._is_due = False

    def due(self) -> None:
        """Ask for a frame. A frame that is asked for already will do."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._wait)

    def _wait(self) -> None:
        left = self._sent_at + TURN_S - self._clock()
        if left <= 0:
            self._now()
            return
        self._sleep(left)
        asyncio.get_running_loop().call_soon(self._now)  # behind the sockets that are ready now

    def _now(self) -> None:
        self._is_due, self._sent_at = False, self._clock()
        self._send()
