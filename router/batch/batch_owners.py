"""BatchOwners: decides which router runs a batch, by router leases or, without them, by the store's locks.

Without leases the store's locks decide, so every process tries each unfinished batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.errors import KvferryError, RegistryUnavailable
from kvferry.router.batch.stores import BatchStore, Place
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)

WATCH_S = 2.0
"""Seconds between checks of the store for batches that nobody owns, as after a loss of all leases."""
OWNED_S = 2 * 86_400.0
"""Seconds for which a batch is owned; for a running batch, each check of the store renews it."""


class BatchOwners:
    """Ownership of the batches of one store. owned: this router's leased work; None without leases."""

    def __init__(self, store: BatchStore, owned: RouterOwnership | None) -> None:
        self._store, self._owned = store, owned
        self._trouble = RateLimitedLog(log)

    @property
    def leased(self) -> bool:
        """Whether leases say who runs a batch."""
        return self._owned is not None

    async def begin(self, place: Place, *, idle: bool) -> bool:
        """Own a new batch; return whether this router runs it.

        A router that is not idle gives it up, so that the first one that checks the store claims it."""
        if self._owned is None:
            return True
        with contextlib.suppress(RegistryUnavailable):  # the next check of the store finds the batch
            taken = await self._owned.take(self._store.kind, place.name, OWNED_S)
            if taken and not idle:
                await self._owned.release(self._store.kind, place.name)
            return taken and idle
        return False

    async def end(self, place: Place) -> None:
        """Stop owning a batch, which has ended."""
        if self._owned is not None:
            with contextlib.suppress(RegistryUnavailable):  # another router then claims it and finds that it has ended
                await self._owned.drop(self._store.kind, place.name)

    async def give_up(self, places: Iterable[Place]) -> None:
        """Leave batches to other routers."""
        if self._owned is not None:
            with contextlib.suppress(RegistryUnavailable):  # the end of the lease also gives them up
                for place in places:
                    await self._owned.release(self._store.kind, place.name)

    async def watched(
        self, start: Callable[[Place], None], running: Collection[Place], leave: Callable[[], Awaitable[None]]
    ) -> None:
        """Start batches when this router becomes their owner, until cancelled; `leave` gives all up when it drains."""

        async def claimed(name: str) -> None:
            start(Place.named(name))

        if self._owned is not None:
            self._owned.take_over(self._store.kind, claimed)
            self._owned.on_drain(leave)
        known: Collection[Place] = ()
        while True:
            try:
                found = await self._store.unfinished()
                for place in found:
                    if await self._take(place, known) and place not in running:
                        start(place)
                known = set(found)
            except (OSError, KvferryError) as error:
                self._trouble.warning("unfinished batches are not watched: %s", error)
            await asyncio.sleep(WATCH_S)

    async def _take(self, place: Place, known: Collection[Place]) -> bool:
        """Own a batch that was unowned at the last check too, since a new batch belongs first to its creator."""
        if self._owned is None:
            return True
        return place in known and await self._owned.take(self._store.kind, place.name, OWNED_S)
