"""Node registry: live nodes, each under a lease that its process renews.

Implementations: `redis_store.RedisStore` and `memory_store.MemoryStore`. Their calls raise RegistryUnavailable and
nothing else; every call may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvferry.protocol.errors import KvferryError, RegistryRefuses
from kvferry.protocol.lease import NodeLease
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.registry")

LEASE_S = 5.0
"""Life of a lease after its last renewal."""
RENEWAL_S = 1.0


class Announced(StrEnum):
    """Result of announcing a lease.

    The registry held this node's own lease, none (first, expired, or lost), or a live lease of a newer epoch, which
    stays."""

    RENEWED = "renewed"
    CREATED = "created"
    FENCED = "fenced"


class Registry(Protocol):
    """Leases by node id. Of two processes with one node id the newer epoch wins."""

    async def next_epoch(self, node_id: str, least: int) -> int:
        """An epoch for a process that starts: `least`, or above all that this node's processes had, whatever became of
        the clock of its machine."""

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
    lease_s       life of a lease in this registry

    A lease stands once it was read back where routers read it, and renewed since: a registry that takes a lease may not
    keep it, or not be the one that routers ask. One that lapsed must be read back again.

    trouble: why the lease is not held, as of the last try; empty while it is.

    Belongs to one asyncio loop; callbacks come on it. The log has one line per outage, and one more if it outlives the
    lease; a line each ten seconds where the registry refuses us, which somebody has to mend.
    """

    def __init__(
        self,
        registry: Registry,
        make_lease: Callable[[], NodeLease],
        *,
        on_restored: Callable[[], None] = lambda: None,
        on_outcome: Callable[[str], None] = lambda outcome: None,
        period_s: float = RENEWAL_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._registry, self._make_lease = registry, make_lease
        self._on_restored, self._on_outcome = on_restored, on_outcome
        self._period_s, self._lease_s = period_s, lease_s
        self._held_until = 0.0
        self.trouble = "the registry was not asked yet"
        self._refused = RateLimitedLog(log)
        self._stands = self._absence_told = self._lapse_told = False
        self._held_once = asyncio.Event()
        self._failures = 0
        self.fenced = False
        self._announced: tuple[str, int] | None = None
        self._busy = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Return whether the registry has our lease: it stands, and was renewed less than its life ago."""
        return self._stands and time.monotonic() < self._held_until

    def start(self) -> None:
        """Announce now, and go on until `stop`."""
        self._task = asyncio.create_task(self._keep(), name="lease-keeper")

    async def first_held(self) -> None:
        """Returns once a lease of ours stands."""
        await self._held_once.wait()

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
        self._held_until = 0.0
        if self._announced is not None:
            try:
                await self._registry.withdraw(*self._announced)
            except KvferryError as error:
                log.warning("lease not withdrawn, it will expire: %s", error)

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            if await self.announce_now() and not self._stands:
                await self._read_back()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s()):
                    await self._stopping.wait()

    async def _read_back(self) -> None:
        """Look for our lease as a router would, and renew it where it is found."""
        try:
            found = {(lease.node_id, lease.epoch) for lease in await self._registry.nodes()}
        except Exception as error:
            self._note_failure(error)
            return
        if self._announced not in found:
            self.trouble = "the registry took the lease and does not have it"
            if not self._absence_told:
                log.warning("the registry took the lease of %s and does not have it", self._announced)
            self._absence_told = True
            return
        async with self._busy:
            outcome = await self._announce()
            self._stands = outcome == Announced.RENEWED
        self._on_outcome(outcome)
        if self._stands:
            self._absence_told, self.trouble = False, ""
            self._held_once.set()

    def _delay_s(self) -> float:
        """The period; after failures soon again, then less often, spread so that nodes do not return all at once."""
        if self._failures == 0:
            return self._period_s
        return min(self._period_s * 0.1 * 2.0**self._failures, 2 * self._period_s) * random.uniform(0.5, 1.0)

    async def _announce(self) -> str:
        began = time.monotonic()
        try:
            lease = self._make_lease()
            outcome = await self._registry.announce(lease)
        except Exception as error:
            self._note_failure(error)
            return "failed"
        fenced = outcome is Announced.FENCED
        self._stands = self._stands and not fenced and began < self._held_until
        self._held_until = 0.0 if fenced else began + self._lease_s
        if fenced and not self.fenced:
            log.error("node id %s is taken by a newer process: this one gets no work", lease.node_id)
        self.fenced = fenced
        restored = self._failures > 0 or (outcome is Announced.CREATED and self._announced is not None)
        self._failures, self._announced = 0, (lease.node_id, lease.epoch)
        self._lapse_told = False
        self.trouble = "a newer process has the node's name" if fenced else "" if self._stands else self.trouble
        if restored:
            log.info("lease of %s restored", lease.node_id)
            self._on_restored()
        return outcome.value

    def _note_failure(self, error: Exception) -> None:
        self._failures = min(self._failures + 1, 10)
        self.trouble = str(error)
        if isinstance(error, RegistryRefuses):
            self._refused.warning("lease not written, the registry refuses this node: %s", error)
        elif self._failures == 1:
            known = isinstance(error, KvferryError)
            log.warning("lease not written: %s", error, exc_info=None if known else error)
        elif self._announced is not None and time.monotonic() >= self._held_until and not self._lapse_told:
            self._lapse_told = True
            log.warning("the lease of %s has lapsed: not ready until the registry answers", self._announced[0])
