"""Graceful close of idle keep-alive connections at shutdown.

A client may have sent its next request already; if the connection closed at once, nobody could tell whether it ran."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from kvferry.runtime.connection_counts import ConnectionCounts
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import GuardedProtocol
from kvferry.runtime.rejection_throttle import RejectionThrottle

LINGER_S = 0.5
"""What a client sent before it could know of the end is here sooner than that."""


def lingering(limits: Limits, throttle: RejectionThrottle) -> type[asyncio.Protocol]:
    """Return a protocol as `connections.guarded` does; malformed requests are throttled."""
    connection_counts = ConnectionCounts(limits.per_address, throttle)
    return cast(
        "type[asyncio.Protocol]", partial(LingeringProtocol, limits=limits, connection_counts=connection_counts)
    )


class LingeringProtocol(GuardedProtocol):
    """One connection. Asked to end, it takes one more request for LINGER_S, which is its last."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._ends = False

    def shutdown(self) -> None:
        self._ends = True
        if self._answering:
            super().shutdown()
        else:
            self.loop.call_later(LINGER_S, super().shutdown)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._ends and self.cycle is not None:
            self.cycle.keep_alive = False
