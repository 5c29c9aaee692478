"""Bounds on unread output: bytes in kernel and transport, and a minimum read rate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

KERNEL_BYTES = 128 * 1024
"""Of one connection, that the kernel keeps without having sent them; without a bound it takes megabytes, and anyone who
answers never hears that nobody reads. The transport adds 64 KiB, and one event."""


class UnreadOutput:
    """Unread output of one connection: `stalled` when the transport holds too much, `flows` when it no longer does.

    A peer that takes less than `least` bytes a second for `wait_s` is cut off, as it is by the kernel when it takes
    nothing for so long, be the answer complete. wait_s 0: any pace will do."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, wait_s: float, least: float):
        self._transport, self._loop = transport, loop
        self._wait_s, self._least = wait_s, least
        self._timer: asyncio.TimerHandle | None = None
        _bound(transport.get_extra_info("socket"), wait_s)

    def stalled(self) -> None:
        if self._wait_s and self._timer is None:
            self._look(None)

    def flows(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int | None) -> None:
        """Return whether enough was taken since `before` bytes were left.

        What is added meanwhile counts against the peer, but nobody adds while the transport has too much."""
        left = self._transport.get_write_buffer_size()
        if before is not None and before - left < max(1.0, self._least * self._wait_s):
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._wait_s, self._look, left)


def _bound(sock: Any, wait_s: float) -> None:
    """A socket that is not TCP's, or a system that knows neither option, goes without."""
    options = {"TCP_NOTSENT_LOWAT": KERNEL_BYTES}
    if wait_s:
        options["TCP_USER_TIMEOUT"] = max(1, int(wait_s * 1000))
    for name, value in options.items():
        number = getattr(socket, name, None)
        if number is not None and sock is not None:
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
