"""Leases of router processes, and the work that each of them owns in the cluster.

A router renews its lease; the work of a router whose lease lapsed, or that gave the work up, is claimed by one other.
Implementations: `redis_router_leases.RedisRouterLeases` and `memory_router_leases.MemoryRouterLeases`. Calls raise only
RegistryUnavailable, and every call may be repeated. Time is the store's own, so that routers' clocks do not matter."""

from __future__ import annotations

from typing import NamedTuple, Protocol

ROUTER_LEASE_S = 1.5
"""Seconds after its last renewal when a router counts as dead."""
STREAM_LEASE_S = 0.9
"""Seconds after its last renewal when a router counts as dead for a client that comes back to another one.

The broken stream is a second sign, so that one late renewal suffices."""
MAX_ORPHANS = 256
"""Most tasks that one look at orphans returns."""


class OwnedTask(NamedTuple):
    """Work that one router owns: its kind, such as "response" or "batch", without a colon, and its name."""

    kind: str
    name: str


class RouterLeases(Protocol):
    """Owners by task. An owner is the id of one router process, never used again by another."""

    async def renew(self, owner: str) -> None:
        """Renew the lease of a router."""

    async def withdraw(self, owner: str) -> None:
        """End the lease of a router at once; its tasks are orphans."""

    async def alive(self, owner: str) -> bool:
        """Return whether the router renewed its lease in the last ROUTER_LEASE_S."""

    async def take(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        """Own a new task for `ttl_s`, or prolong an own one; return False if another router owns it."""

    async def claim(self, owner: str, task: OwnedTask, ttl_s: float, *, by_force: bool = False) -> bool:
        """Own an existing task whose owner is dead or gave it up; return whether it is now this router's.

        by_force: from a living owner, too, which notices at its next look."""

    async def holds(self, owner: str, task: OwnedTask) -> bool:
        """Return whether the router still owns the task."""

    async def release(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        """Give up an own task, which others may claim at once and for `ttl_s`; return False if it was not own."""

    async def drop(self, owner: str, task: OwnedTask) -> bool:
        """End an own task; return False if it was not own."""

    async def orphans(self) -> list[OwnedTask]:
        """Return up to MAX_ORPHANS tasks of dead owners and tasks given up."""
