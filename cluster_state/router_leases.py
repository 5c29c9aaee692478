"""Interface of the leases of router processes, and of the tasks (responses, batches) that each of them owns.

A router renews its lease. Another router claims the tasks of a router whose lease lapsed or that released them.
Implementations: `redis_router_leases.RedisRouterLeases` and `memory_router_leases.MemoryRouterLeases`. Calls raise only
RegistryUnavailable, and every call may be repeated. Time is the store's own, so that routers' clocks do not matter."""

from __future__ import annotations

from typing import NamedTuple, Protocol

ROUTER_LEASE_S = 1.5
"""Time after its last renewal after which a router counts as dead, in seconds."""
STREAM_LEASE_S = 0.9
"""Time after its last renewal after which a router counts as dead for a client that reconnects, in seconds.

The broken stream is a second sign, so that one late renewal suffices."""
MAX_ORPHANS = 256
"""Maximum number of tasks that `orphans` returns."""


class OwnedTask(NamedTuple):
    """Work that one router owns: its kind, such as "response" or "batch", without a colon, and its name."""

    kind: str
    name: str


class RouterLeases(Protocol):
    """Owners by task. An owner is the id of one router process, which no other process reuses."""

    async def renew(self, owner: str) -> None:
        """Renew the lease of a router."""

    async def withdraw(self, owner: str) -> None:
        """End the lease of a router at once; its tasks become orphans."""

    async def alive(self, owner: str) -> bool:
        """Return whether the router renewed its lease in the last ROUTER_LEASE_S."""

    async def take(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        """Become the owner of a new task for `ttl_s`, or renew ownership; return False if another router owns it."""

    async def claim(self, owner: str, task: OwnedTask, ttl_s: float, *, by_force: bool = False) -> bool:
        """Become the owner of an existing task whose owner is dead or released it; return whether `owner` owns it now.

        by_force: even if the owner is alive; it notices the loss at its next check."""

    async def holds(self, owner: str, task: OwnedTask) -> bool:
        """Return whether the router still owns the task."""

    async def release(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        """Release a task, which other routers may claim for `ttl_s`; return False if `owner` did not own it."""

    async def drop(self, owner: str, task: OwnedTask) -> bool:
        """End a task; return False if `owner` did not own it."""

    async def orphans(self) -> list[OwnedTask]:
        """Return up to MAX_ORPHANS tasks whose owners are dead or released them."""
