"""Leases of routers and owners of their tasks in process memory, for routers without Redis and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.cluster_state.router_leases import MAX_ORPHANS, ROUTER_LEASE_S, OwnedTask
from kvferry.protocol.errors import RegistryUnavailable


class MemoryRouterLeases:
    """Leases of the routers of one process. Implements cluster_state.router_leases.RouterLeases.

    If `available` is False, every call raises RegistryUnavailable. clock: monotonic seconds."""

    def __init__(self, *, lease_s: float = ROUTER_LEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.available = True
        self._lease_s, self._clock = lease_s, clock
        self._leases: dict[str, float] = {}
        self._tasks: dict[OwnedTask, tuple[str, float]] = {}

    async def close(self) -> None:
        """Do nothing."""

    async def renew(self, owner: str) -> None:
        self._check_available()
        self._leases[owner] = self._clock()

    async def withdraw(self, owner: str) -> None:
        self._check_available()
        self._leases.pop(owner, None)

    async def alive(self, owner: str) -> bool:
        self._check_available()
        return self._alive(owner)

    async def take(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        if self._owner(task) not in (None, owner):
            return False
        self._tasks[task] = (owner, self._clock() + ttl_s)
        return True

    async def claim(self, owner: str, task: OwnedTask, ttl_s: float, *, by_force: bool = False) -> bool:
        known = self._owner(task)
        if known is None or (known != owner and self._alive(known) and not by_force):
            return False
        self._tasks[task] = (owner, self._clock() + ttl_s)
        return True

    async def holds(self, owner: str, task: OwnedTask) -> bool:
        return self._owner(task) == owner

    async def release(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        if self._owner(task) != owner:
            return False
        self._tasks[task] = ("", self._clock() + ttl_s)
        return True

    async def drop(self, owner: str, task: OwnedTask) -> bool:
        if self._owner(task) != owner:
            return False
        del self._tasks[task]
        return True

    async def orphans(self) -> list[OwnedTask]:
        self._check_available()
        owners = {task: self._owner(task) for task in list(self._tasks)}
        return [task for task, owner in owners.items() if owner is not None and not self._alive(owner)][:MAX_ORPHANS]

    def _check_available(self) -> None:
        if not self.available:
            raise RegistryUnavailable("the store of leases is unavailable")

    def _alive(self, owner: str) -> bool:
        renewed = self._leases.get(owner)
        return bool(owner) and renewed is not None and self._clock() - renewed <= self._lease_s

    def _owner(self, task: OwnedTask) -> str | None:
        """Return the owner of a task, empty if it was released; None for an unknown task."""
        self._check_available()
        owner, ends = self._tasks.get(task, ("", 0.0))
        if ends <= self._clock():
            self._tasks.pop(task, None)
            return None
        return owner
