"""LeaseRelay: passes the registry's leases, and this node's own, to routers that cannot reach the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

from fastapi import FastAPI, Response

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.relayed_leases import RelayedLeases
from kvferry.protocol.wire import pack
from kvferry.worker.message_stream import MEDIA_TYPE

READ_S = 0.5
"""Longest time of a read of the registry for routers, in seconds; beyond it they get this node's own lease."""
FRESH_S = 0.25
"""Time for which all routers get the same answer, in seconds, so that many of them cost the registry one read."""


class LeaseRecords(Protocol):
    """The registry's records; `announced` is the last one of this process's lease, or empty."""

    announced: bytes

    async def fetch(self) -> list[bytes]:
        """Return all live leases as they are written, unread; raise if the registry is unreachable."""


class LeaseRelay:
    """Answers `GET /leases` with one read of the registry at a time. Routers verify the leases' seals themselves."""

    def __init__(self, records: LeaseRecords, clock: Callable[[], float] = time.monotonic) -> None:
        self._records, self._clock = records, clock
        self._reading: asyncio.Task[RelayedLeases] | None = None
        self._began_at = -inf

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.get("/leases")(self.get_leases)

    async def get_leases(self) -> Response:
        """Return the leases."""
        now, reading = self._clock(), self._reading
        if reading is None or (reading.done() and now - self._began_at >= FRESH_S):
            reading = self._reading = asyncio.create_task(self._read(), name="lease-relay")
            self._began_at = now
        return Response(pack(await asyncio.shield(reading)), media_type=MEDIA_TYPE)

    async def _read(self) -> RelayedLeases:
        try:
            async with asyncio.timeout(READ_S):
                records = await self._records.fetch()
        except (KvferryError, TimeoutError):
            records = []
        own = self._records.announced
        return RelayedLeases(tuple(records) if not own or own in records else (*records, own))
