"""Pacing of the frames to routers, as network cards pace interrupts: tokens that come close together share a turn.

Each engine stream is a connection of its own. Where tokens come one at a time, waking up for each of them and writing a
frame of its own costs more than all else that an adapter does with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S, TURN_PER_STREAM_S, MAX_TURN_S = 1e-3, 2.5e-4, 4e-3
"""Shortest time between two frames, and by how much each stream that runs lengthens it up to the largest, in seconds.

A token waits for at most this long: of a stream that runs alone, for little more than a millisecond."""


def turn_s(streams: int) -> float:
    """Return the shortest time between two frames while so many streams run, in seconds."""
    return min(MAX_TURN_S, TURN_S + TURN_PER_STREAM_S * streams)


class FramePacing:
    """Calls `send` soon after `due`, on the asyncio loop, at most once in a turn. streams: returns how many run.

    A frame that is due too early waits on a timer, and what comes meanwhile goes with it."""

    def __init__(
        self, send: Callable[[], None], streams: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._streams, self._clock = send, streams, clock
        self._sent_at = -MAX_TURN_S
        self._is_due = False

    def due(self) -> None:
        """Ask for a frame. A frame that is asked for already will do."""
        if self._is_due:
            return
        self._is_due = True
        left = self._sent_at + turn_s(self._streams()) - self._clock()
        loop = asyncio.get_running_loop()
        if left <= 0:
            loop.call_soon(self._now)  # behind the sockets that are ready now
        else:
            loop.call_later(left, self._now)

    def _now(self) -> None:
        self._is_due, self._sent_at = False, self._clock()
        self._send()
