"""Pacing of large-body parsing, so that it does not block the event loop for other requests."""

from __future__ import annotations

import asyncio

from kvferry.protocol.errors import Overloaded

LONG_BYTES, LONG_S = 64 * 1024, 0.006
"""Bodies below either are nobody's concern."""
SHARE = 0.05
"""Of the loop's time that goes to long bodies while more of them wait: a request in twenty may meet one."""
CREDIT_S = 0.2
"""What they may take at once after a pause."""
PATIENCE_S = 10.0
BYTE_S, VALUE_S, OBJECT_S = 6e-9, 150e-9, 1500e-9
"""What reading takes for each byte, value and object, on a slow machine."""


def cost_s(data: bytes) -> float:
    """Seconds of the loop's time for a body in JSON, about."""
    return len(data) * BYTE_S + data.count(b",") * VALUE_S + data.count(b"{") * OBJECT_S


class ParsePacing:
    """Pacing on one event loop.

    Bodies go in order of arrival."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def turn(self, cost: float) -> None:
        """Wait until a body of this cost may be read. Raises Overloaded when that is too far away."""
        if cost < LONG_S:
            return
        now = asyncio.get_running_loop().time()
        begins = max(self._free_at, now - CREDIT_S / SHARE)
        wait = begins - now
        if wait > PATIENCE_S:
            raise Overloaded("too many long bodies are waiting to be read", retry_after=wait - PATIENCE_S + 1)
        self._free_at = begins + cost / SHARE
        if wait > 0:
            await asyncio.sleep(wait)
