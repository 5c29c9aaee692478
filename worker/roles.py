"""Current role of a node (prefill, decode), and role changes on an elastic node, requested by `POST /role`.

A change is a drain without exit. The node accepts no new work, and running work finishes or moves, as when a node ends.
Then the other role's service receives the engine's events. Engine, link, pool, epoch and lease stay, so cached blocks
and other nodes' index rows and addresses stay valid."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.protocol.errors import Draining, InvalidRequest, RoleChangeRefused
from kvferry.protocol.labels import ROLES
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import read_message
from kvferry.worker.membership import Membership

log = logging.getLogger("kvferry.worker")
CHECK_S = 0.05
"""Seconds between two checks for running work."""


@dataclass(slots=True)
class Roles:
    """Current role of a node, as seen by its two threads.

    `now` belongs to the asyncio loop, `computing` to the engine thread, where a change happens first. Each engine event
    thus goes to the role in which it was created. changed_at: time of the last change on the monotonic clock; None:
    never."""

    now: str
    computing: str
    changed_at: float | None = None

    @property
    def role_s(self) -> float:
        """Return the seconds since the last change; 0 if there was none."""
        return 0.0 if self.changed_at is None else max(1e-3, time.monotonic() - self.changed_at)

    def require(self, role: str) -> None:
        """Raise Draining unless the node has this role. On the asyncio loop."""
        if self.now != role:
            raise Draining(f"this is a {self.now} node now")


class RoleChange:
    """Role changes of one node, one at a time, on the asyncio loop unless stated.

    elastic   true if the node may change its role
    call_soon as in NodeParts: its calls run after earlier engine events
    drains    sets whether the node rejects new work; the caller updates the lease
    busy      returns whether work of the current role is running
    within_s  maximum time for that work to end, in seconds; after it the node keeps its role"""

    def __init__(
        self,
        roles: Roles,
        engine: EngineLoop,
        membership: Membership,
        metrics: WorkerMetrics,
        *,
        elastic: bool,
        call_soon: Callable[[Callable[[], None]], None],
        drains: Callable[[bool], None],
        busy: Callable[[], bool],
        within_s: float,
    ) -> None:
        self._roles, self._engine, self._membership, self._metrics = roles, engine, membership, metrics
        self._call_soon = call_soon
        self._elastic, self._drains, self._busy, self._within_s = elastic, drains, busy, within_s
        self._task: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._ended = False

    async def post_role(self, request: Request) -> None:
        """Handle `POST /role`: begin a role change."""
        await self.begin(await read_message(request, ChangeRole))

    async def begin(self, change: ChangeRole) -> None:
        """Return once the node has begun to change, or if it already has the role.

        Raises InvalidRequest if the node can never change, and RoleChangeRefused if it must keep its role for now."""
        if change.role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}; got {change.role!r}", param="role")
        if not self._elastic:
            raise InvalidRequest("this node runs without --elastic", param="role")
        async with self._asking:
            if self._task is not None or self._ended:
                raise RoleChangeRefused("the node is already changing its role, or stopping")
            if change.role == self._roles.now:
                return
            if 0 < self._roles.role_s < change.rest_s:
                raise RoleChangeRefused(f"the node changed its role {self._roles.role_s:.0f} s ago")
            if why := await self._membership.try_leave_role(change.rest_s):
                self._metrics.role_changes["kept"].inc()
                raise RoleChangeRefused(why)
            if self._ended:
                raise RoleChangeRefused("the node is stopping")
            self._task = asyncio.create_task(self._change(change.role), name="role-change")

    async def stop(self) -> None:
        """Cancel a running change, because the node ends, and allow no further one."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self, role: str) -> None:
        before = self._roles.now
        log.info("a %s node becomes a %s node", before, role)
        try:
            self._drains(True)
            await self._membership.announce()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._within_s):
                    await self._until_changed(role)
        finally:
            self._task = None
            self._drains(False)
            self._membership.keep_role()
        if self._roles.now != role:
            self._metrics.role_changes["kept"].inc()
            log.warning("the node stays a %s node: it is the last one, or its requests did not end", before)
        await self._membership.announce()

    async def _until_changed(self, role: str) -> None:
        """Return once the role has changed, or once this node is the last one of its role."""
        while True:
            while self._busy():  # noqa: ASYNC110 - no event reports it
                await asyncio.sleep(CHECK_S)
            if not await self._membership.has_substitute():
                return
            changed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._engine.submit(lambda engine, changed=changed: self._pass(engine, role, changed))  # type: ignore[misc]
            if await changed:
                return
            await asyncio.sleep(CHECK_S)

    def _pass(self, engine: Engine, role: str, changed: asyncio.Future[bool]) -> None:
        """Switch engine events to the other role, if the engine has no work and no events of the current role.

        On the engine thread: earlier events are already queued for the loop, and later ones follow."""
        quiet = not (engine.request_table or engine.moving or engine.events)
        if quiet:
            self._roles.computing = role
        self._call_soon(lambda: self._passed(role if quiet else "", changed))

    def _passed(self, role: str, changed: asyncio.Future[bool]) -> None:
        if role:
            self._roles.now, self._roles.changed_at = role, time.monotonic()
            self._metrics.count_as(role)
            self._metrics.role_changes["done"].inc()
            log.info("the node is now a %s node", role)
        if not changed.done():
            changed.set_result(bool(role))
