"""TenantPlaces: limits how much of one kind of work runs at once, for all tenants together and for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class TenantPlaces:
    """Places for one kind of work, `limit` of all tenants and `per_tenant` of one. Belongs to one asyncio loop."""

    def __init__(self, limit: int, per_tenant: int) -> None:
        self._all, self._per_tenant = asyncio.Semaphore(limit), per_tenant
        self._of = WeakValueDictionary[str, asyncio.Semaphore]()

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the block ends. A tenant's own places come first."""
        async with self._of.setdefault(tenant, asyncio.Semaphore(self._per_tenant)), self._all:
            yield
