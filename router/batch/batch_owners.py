"""BatchOwners: decides which router runs a batch, by router leases or, without them, by the store's locks.

Without leases every process tries to lock each unfinished batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.errors import KvferryError, RegistryUnavailable
from kvferry.router.batch.stores import BatchKey, BatchStore
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)

WATCH_S = 2.0
"""Seconds between checks of the store for batches without an owner, as after a loss of all leases."""
OWNED_S = 2 * 86_400.0
"""Seconds for which a batch is owned; each check of the store renews the ownership of a running batch."""


class BatchOwners:
    """Ownership of the batches of one store. owned: this router's leased work; None without leases."""

    def __init__(self, store: BatchStore, owned: RouterOwnership | None) -> None:
        self._store, self._owned = store, owned
        self._warnings = RateLimitedLog(log)

    @property
    def leased(self) -> bool:
        """Return whether leases decide which router runs a batch."""
        return self._owned is not None

    async def begin(self, key: BatchKey, *, idle: bool) -> bool:
        """Take ownership of a new batch; return whether this router runs it.

        A router that is not idle releases it, so that the first router that checks the store claims it."""
        if self._owned is None:
            return True
        with contextlib.suppress(RegistryUnavailable):  # the next check of the store finds the batch
            taken = await self._owned.take(self._store.kind, key.name, OWNED_S)
            if taken and not idle:
                await self._owned.release(self._store.kind, key.name)
            return taken and idle
        return False

    async def end(self, key: BatchKey) -> None:
        """End the ownership of a batch that has ended."""
        if self._owned is not None:
            with contextlib.suppress(RegistryUnavailable):  # another router then claims it and finds that it has ended
                await self._owned.drop(self._store.kind, key.name)

    async def release(self, keys: Iterable[BatchKey]) -> None:
        """Release batches to other routers."""
        if self._owned is not None:
            with contextlib.suppress(RegistryUnavailable):  # the end of the lease also releases them
                for key in keys:
                    await self._owned.release(self._store.kind, key.name)

    async def watch(
        self, start: Callable[[BatchKey], None], running: Collection[BatchKey], on_drain: Callable[[], Awaitable[None]]
    ) -> None:
        """Start batches when this router becomes their owner, until cancelled; `on_drain` is called when it drains."""

        async def claimed(name: str) -> None:
            start(BatchKey.parse(name))

        if self._owned is not None:
            self._owned.take_over(self._store.kind, claimed)
            self._owned.on_drain(on_drain)
        known: Collection[BatchKey] = ()
        while True:
            try:
                found = await self._store.unfinished()
                for key in found:
                    if await self._take(key, known) and key not in running:
                        start(key)
                known = set(found)
            except (OSError, KvferryError) as error:
                self._warnings.warning("unfinished batches are not watched: %s", error)
            await asyncio.sleep(WATCH_S)

    async def _take(self, key: BatchKey, known: Collection[BatchKey]) -> bool:
        """Own a batch without an owner, also at the previous check: a new batch first belongs to its creator."""
        if self._owned is None:
            return True
        return key in known and await self._owned.take(self._store.kind, key.name, OWNED_S)
