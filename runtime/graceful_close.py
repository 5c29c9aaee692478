"""Graceful close of idle keep-alive HTTP connections at shutdown: each accepts one last request.

A client may already have sent its next request. If the connection closed at once, the client could not tell whether
that request ran."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from kvferry.runtime.connection_counts import ConnectionCounts
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import GuardedProtocol
from kvferry.runtime.rejection_throttle import RejectionThrottle

LINGER_S = 0.5
"""Time for which a closing idle connection accepts a last request; longer than a request takes to arrive."""


def lingering(limits: Limits, throttle: RejectionThrottle) -> type[asyncio.Protocol]:
    """Return a protocol like `connections.guarded` does, which also closes gracefully and throttles rejections."""
    connection_counts = ConnectionCounts(limits.per_address, throttle, limits.connections)
    return cast(
        "type[asyncio.Protocol]", partial(LingeringProtocol, limits=limits, connection_counts=connection_counts)
    )


class LingeringProtocol(GuardedProtocol):
    """Connection that accepts one last request for LINGER_S seconds after `shutdown`."""

    __slots__ = ("_ends",)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._ends = False

    def shutdown(self) -> None:
        """Close after the response in flight, or after LINGER_S if the connection is idle."""
        self._ends = True
        if self._answering:
            super().shutdown()
        else:
            self.loop.call_later(LINGER_S, super().shutdown)

    def on_headers_complete(self) -> None:
        """Accept a request; after `shutdown` it is the connection's last."""
        super().on_headers_complete()
        if self._ends and self.cycle is not None:
            self.cycle.keep_alive = False
