"""Interface of the node registry, and LeaseKeeper, with which a node renews its lease there.

The registry holds the live nodes, each under a lease that its process renews. Implementations:
`redis_store.RedisStore` and `memory_store.MemoryStore`. Calls raise only RegistryUnavailable, and may be repeated."""

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
"""Seconds after which a lease expires unless it is renewed."""
RENEWAL_S = 1.0
"""Seconds between renewals of a lease."""


class Announced(StrEnum):
    """Result of announcing a lease.

    RENEWED: the registry had this lease. CREATED: it had none (first time, expired or lost). FENCED: it has a live
    lease of a newer epoch, which stays."""

    RENEWED = "renewed"
    CREATED = "created"
    FENCED = "fenced"


class Registry(Protocol):
    """Leases by node id. Of two processes with one node id the newer epoch wins."""

    async def next_epoch(self, node_id: str, least: int) -> int:
        """Return an epoch for a starting process: at least `least`, and above all earlier ones of this node.

        It increases even if the machine's clock was set back."""

    async def announce(self, lease: NodeLease) -> Announced:
        """Write the lease, which expires LEASE_S from now."""

    async def withdraw(self, node_id: str, epoch: int) -> None:
        """Remove the lease if this epoch wrote it."""

    async def nodes(self) -> list[NodeLease]:
        """Return all live leases, in no particular order."""


class LeaseKeeper:
    """Announces a node's lease every second while the node serves. No method raises.

    make_lease    returns the current lease
    on_restored   called when the registry answers again after a failure, or lost our lease: published rows may be lost
    on_outcome    called with "renewed", "created", "fenced" or "failed" after each attempt
    lease_s       seconds after which a lease expires in this registry
    trouble       reason for which the lease is not held, as of the last attempt; empty while it is held

    A lease counts as held once it was read back as routers read it, and renewed since: a registry that accepts a lease
    may not store it, or may not be the one that routers read. A lapsed lease must be read back again.

    Belongs to one asyncio loop; callbacks run on it. The log has one line per outage and one more if it lasts longer
    than the lease, or a line every ten seconds while the registry refuses this node, which an operator has to fix."""

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
        self.trouble = "the registry has not been queried yet"
        self._refused = RateLimitedLog(log)
        self._confirmed = self._logged_absence = self._logged_lapse = False
        self._held_event = asyncio.Event()
        self._failures = 0
        self.fenced = False
        self._announced: tuple[str, int] | None = None
        self._busy = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Return whether the registry has our lease: it was read back, and renewed less than `lease_s` ago."""
        return self._confirmed and time.monotonic() < self._held_until

    def start(self) -> None:
        """Announce now, and periodically until `stop`."""
        self._task = asyncio.create_task(self._keep(), name="lease-keeper")

    async def first_held(self) -> None:
        """Wait until a lease of this node is held for the first time."""
        await self._held_event.wait()

    async def announce_now(self) -> bool:
        """Announce at once, because the node's state changed; return whether the registry accepted the lease."""
        async with self._busy:
            outcome = await self._announce()
        self._on_outcome(outcome)
        return outcome in (Announced.RENEWED, Announced.CREATED)

    async def stop(self) -> None:
        """Finish the current announcement, then withdraw the lease."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        self._held_until = 0.0
        if self._announced is not None:
            try:
                await self._registry.withdraw(*self._announced)
            except KvferryError as error:
                log.warning("the lease could not be withdrawn and will expire: %s", error)

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            if await self.announce_now() and not self._confirmed:
                await self._read_back()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s()):
                    await self._stopping.wait()

    async def _read_back(self) -> None:
        """Read our lease as a router would, and renew it if it is found."""
        try:
            found = {(lease.node_id, lease.epoch) for lease in await self._registry.nodes()}
        except Exception as error:
            self._note_failure(error)
            return
        if self._announced not in found:
            self.trouble = "the registry accepted the lease and then lost it"
            if not self._logged_absence:
                log.warning("the registry accepted the lease of %s and then lost it", self._announced)
            self._logged_absence = True
            return
        async with self._busy:
            outcome = await self._announce()
            self._confirmed = outcome == Announced.RENEWED
        self._on_outcome(outcome)
        if self._confirmed:
            self._logged_absence, self.trouble = False, ""
            self._held_event.set()

    def _delay_s(self) -> float:
        """Return the seconds until the next attempt: the period, or a jittered exponential backoff after failures."""
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
        self._confirmed = self._confirmed and not fenced and began < self._held_until
        self._held_until = 0.0 if fenced else began + self._lease_s
        if fenced and not self.fenced:
            log.error("node id %s is in use by a newer process: this one gets no work", lease.node_id)
        self.fenced = fenced
        restored = self._failures > 0 or (outcome is Announced.CREATED and self._announced is not None)
        self._failures, self._announced = 0, (lease.node_id, lease.epoch)
        self._logged_lapse = False
        self.trouble = "a newer process has the same node id" if fenced else "" if self._confirmed else self.trouble
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
        elif self._announced is not None and time.monotonic() >= self._held_until and not self._logged_lapse:
            self._logged_lapse = True
            log.warning("the lease of %s has lapsed: not ready until the registry answers", self._announced[0])
