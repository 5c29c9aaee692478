"""Ownership of tasks by one router process: renews the process's lease, and claims the tasks of routers that died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from kvferry.cluster_state.router_leases import OwnedTask, RouterLeases
from kvferry.protocol.errors import KvferryError, RegistryUnavailable
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.ownership")

RENEWAL_S = 0.5
"""Seconds between renewals of a router's lease, and between searches for orphans."""
ORPHAN_TTL_S = 86_400.0
"""Seconds for which a claimed task is owned, unless its new owner takes it for longer."""

Claimed = Callable[[str], Awaitable[None]]
"""Callback that continues a claimed task, given its name."""


class RouterOwnership:
    """Owner of tasks in the cluster, under the lease of one router process.

    `owner` is the id of this process, new at each start. is_shared: other routers use the same leases. Register a
    callback for each kind with `take_over` before `running`. It runs in a separate asyncio task; if it raises
    KvferryError the task is released, and any other error is logged. While the store does not answer, nothing is
    claimed and running work continues."""

    def __init__(self, leases: RouterLeases, *, period_s: float = RENEWAL_S, is_shared: bool = True) -> None:
        self.owner, self.is_shared = secrets.token_hex(8), is_shared
        self._leases, self._period_s = leases, period_s
        self._callbacks: dict[str, Claimed] = {}
        self._owned: dict[OwnedTask, float] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._drain_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._warnings = RateLimitedLog(log)

    def take_over(self, kind: str, claimed: Claimed) -> None:
        """Start claiming orphans of this kind, and call `claimed` for each."""
        self._callbacks[kind] = claimed

    async def take(self, kind: str, name: str, ttl_s: float) -> bool:
        """Become the owner of a new task, or renew the ownership; see RouterLeases.take."""
        task = OwnedTask(kind, name)
        return self._record(task, ttl_s, await self._leases.take(self.owner, task, ttl_s))

    async def claim(self, kind: str, name: str, ttl_s: float, *, by_force: bool = False) -> bool:
        """Become the owner of an existing task; see RouterLeases.claim."""
        task = OwnedTask(kind, name)
        return self._record(task, ttl_s, await self._leases.claim(self.owner, task, ttl_s, by_force=by_force))

    async def holds(self, kind: str, name: str) -> bool:
        """Return whether this router still owns the task; raise RegistryUnavailable."""
        return await self._leases.holds(self.owner, OwnedTask(kind, name))

    async def release(self, kind: str, name: str) -> bool:
        """Release a task, so that another router claims it; return False if this router did not own it."""
        task = OwnedTask(kind, name)
        return await self._leases.release(self.owner, task, self._owned.pop(task, self._period_s))

    async def drop(self, kind: str, name: str) -> bool:
        """End a task; return False if this router did not own it. Raises RegistryUnavailable."""
        task = OwnedTask(kind, name)
        self._owned.pop(task, None)
        return await self._leases.drop(self.owner, task)

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` when this process starts to drain, to release its tasks."""
        self._drain_callbacks.append(callback)

    def drain(self) -> None:
        """Stop claiming, and release owned tasks, since this process will end."""
        if self._draining:
            return
        self._draining = True
        for callback in self._drain_callbacks:
            self._drain_tasks.add(asyncio.create_task(self._run_drain_callback(callback)))

    async def _run_drain_callback(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception:
            log.exception("owned tasks could not be released; other routers claim them once the lease ends")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew the lease and claim orphans during the `with` block; then release the remaining tasks."""
        keeping = asyncio.create_task(self._keep(), name="router-lease")
        try:
            yield
        finally:
            self.drain()
            keeping.cancel()
            await asyncio.gather(keeping, *self._drain_tasks, return_exceptions=True)
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            with contextlib.suppress(RegistryUnavailable):
                await self._leases.withdraw(self.owner)

    async def _keep(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._leases.renew(self.owner)
                if not self._draining:
                    await self._claim_orphans(began + self._period_s)
            except RegistryUnavailable as error:
                self._warnings.warning("cannot look for tasks of dead routers: %s", error)
            await asyncio.sleep(max(self._period_s / 5, began + self._period_s - time.monotonic()))

    async def _claim_orphans(self, until: float) -> None:
        """Claim orphans, in random order, until the lease must be renewed again."""
        orphans = [task for task in await self._leases.orphans() if task.kind in self._callbacks]
        random.shuffle(orphans)
        for task in orphans:
            if self._draining or time.monotonic() >= until:
                return
            if await self.claim(task.kind, task.name, ORPHAN_TTL_S):
                log.info("claimed %s %s of another router", task.kind, task.name)
                running = asyncio.create_task(self._continue(task), name=f"claimed {task.kind} {task.name}")
                self._running.add(running)
                running.add_done_callback(self._running.discard)

    async def _continue(self, task: OwnedTask) -> None:
        try:
            await self._callbacks[task.kind](task.name)
        except KvferryError as error:
            log.warning("releasing %s %s again: %s", task.kind, task.name, error)
            with contextlib.suppress(RegistryUnavailable):
                await self.release(*task)
        except Exception:
            log.exception("%s %s cannot be continued", task.kind, task.name)

    def _record(self, task: OwnedTask, ttl_s: float, owned: bool) -> bool:
        if owned:
            self._owned[task] = ttl_s
        return owned
