"""The node registry: which nodes live, each under a lease that its process renews.

Implementations: `redis_store.RedisStore` and `memory_store.MemoryStore`. Their calls raise RegistryUnavailable and
nothing else; every call may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from protocol.errors import KvferryError
from protocol.messages import NodeLease

log = logging.getLogger("kvferry.registry")

LEASE_S = 5.0
"""Life of a lease after its last renewal."""
RENEWAL_S = 1.0


class Announced(StrEnum):
    """What an announcement met: its own lease, none (first, expired, or the registry lost its data), or the live lease
    of a newer epoch, which stays."""

    RENEWED = "renewed"
    CREATED = "created"
    FENCED = "fenced"


class Registry(Protocol):
    """Leases by node id. Of two processes with one node id the newer epoch wins."""

    async def announce(self, lease: NodeLease) -> Announced:
        """Write the lease; it lives LEASE_S from now."""

    async def withdraw(self, node_id: str, epoch: int) -> None:
        """Remove the lease if this epoch wrote it."""

    async def nodes(self) -> list[NodeLease]:
        """Every live lease, in no order."""


class LeaseKeeper:
    """Announces a node every second for as long as it serves. Nothing here raises.

    make_lease    the lease as of now
    on_restored   the registry answers again after a failure, or lost our lease: what was published there may be gone
    on_outcome    told "renewed", "created", "fenced" or "failed" after each try

    Belongs to one asyncio loop; callbacks come on it.
    """

    def __init__(
        self,
        registry: Registry,
        make_lease: Callable[[], NodeLease],
        *,
        on_restored: Callable[[], None] = lambda: None,
        on_outcome: Callable[[str], None] = lambda outcome: None,
        period_s: float = RENEWAL_S,
    ) -> None:
        self._registry, self._make_lease = registry, make_lease
        self._on_restored, self._on_outcome = on_restored, on_outcome
        self._period_s = period_s
        self._failures = 0
        self._fenced = False
        self._announced: tuple[str, int] | None = None
        self._busy = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announce once, then keep announcing until `stop`."""
        await self.announce_now()
        self._task = asyncio.create_task(self._keep(), name="lease-keeper")

    async def announce_now(self) -> bool:
        """Announce outside the rhythm (the node's state changed). Returns whether the registry took it."""
        async with self._busy:
            outcome = await self._announce()
        self._on_outcome(outcome)
        return outcome in (Announced.RENEWED, Announced.CREATED)

    async def stop(self) -> None:
        """Finish the announcement under way, then withdraw the lease."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        if self._announced is not None:
            try:
                await self._registry.withdraw(*self._announced)
            except KvferryError as error:
                log.warning("lease not withdrawn, it will expire: %s", error)

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._delay_s()):
                    await self._stopping.wait()
            except TimeoutError:
                await self.announce_now()

    def _delay_s(self) -> float:
        """The period; after failures soon again, then less often, spread so that nodes do not return all at once."""
        if self._failures == 0:
            return self._period_s
        return min(self._period_s * 0.1 * 2.0**self._failures, 2 * self._period_s) * random.uniform(0.5, 1.0)

    async def _announce(self) -> str:
        try:
            lease = self._make_lease()
            outcome = await self._registry.announce(lease)
        except Exception as error:
            self._failures = min(self._failures + 1, 10)
            if self._failures == 1:
                known = isinstance(error, KvferryError)
                log.warning("lease not renewed: %s", error, exc_info=None if known else error)
            return "failed"
        if outcome is Announced.FENCED and not self._fenced:
            log.error("node id %s is taken by a newer process: this one gets no work", lease.node_id)
        self._fenced = outcome is Announced.FENCED
        restored = self._failures > 0 or (outcome is Announced.CREATED and self._announced is not None)
        self._failures, self._announced = 0, (lease.node_id, lease.epoch)
        if restored:
            log.info("lease of %s restored", lease.node_id)
            self._on_restored()
        return outcome.value
