"""UnreadOutput: aborts a connection whose client reads a response too slowly, by a minimum rate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

KERNEL_BYTES = 128 * 1024
"""Maximum number of unsent bytes of one connection in the kernel; the transport adds 64 KiB and one event.

Without a limit the kernel accepts megabytes, so the server does not notice that the client stopped reading."""


class UnreadOutput:
    """Watch over one connection's unread output, which cuts off a client that reads too slowly.

    It aborts a connection whose peer reads less than `min_rate` bytes per second for `wait_s`. The kernel aborts it if
    the peer reads nothing for `wait_s`, even after a complete response. wait_s 0: no limit."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, wait_s: float, min_rate: float):
        self._transport, self._loop = transport, loop
        self._wait_s, self._min_rate = wait_s, min_rate
        self._timer: asyncio.TimerHandle | None = None
        _bound(transport.get_extra_info("socket"), wait_s)

    def stalled(self) -> None:
        """Start the watch: the transport's buffer is full."""
        if self._wait_s and self._timer is None:
            self._check(None)

    def flows(self) -> None:
        """Stop the watch: the transport's buffer has drained."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, before: int | None) -> None:
        """Abort unless the peer has read enough since `before` bytes were left; else check again after `wait_s`.

        Bytes added meanwhile would count against the peer, but writers pause while the buffer is full."""
        left = self._transport.get_write_buffer_size()
        if before is not None and before - left < max(1.0, self._min_rate * self._wait_s):
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._wait_s, self._check, left)


def _bound(sock: Any, wait_s: float) -> None:
    """Set the kernel's bounds on a socket; ignores sockets that are not TCP and options that the system lacks."""
    options = {"TCP_NOTSENT_LOWAT": KERNEL_BYTES}
    if wait_s:
        options["TCP_USER_TIMEOUT"] = max(1, int(wait_s * 1000))
    for name, value in options.items():
        number = getattr(socket, name, None)
        if number is not None and sock is not None:
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
