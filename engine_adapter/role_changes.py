"""Role changes of an elastic adapter, whose engine can change between prefill and decode.

The node takes nothing new, its requests end, its engine changes, and it joins again in the other role with a new epoch:
the engine forgets its cache, and no router confuses the two. If the engine refuses or does not answer, it is asked to
keep its old role, and the node continues as before. An engine of neither role counts as gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request

from kvferry.engine_adapter.engine import ElasticEngine, Engine
from kvferry.engine_adapter.node_state import NodeState
from kvferry.protocol.errors import InvalidRequest, KvferryError, NodeDown, Overloaded, RoleChangeRefused, StepFailed
from kvferry.protocol.labels import ROLES
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import read_message

log = logging.getLogger("kvferry.adapter")

CHECK_S = 0.1
"""Seconds between two checks of whether the engine is idle."""
ANSWER_S = 1.0
"""Seconds for which a role request waits for the outcome: a change that fails within it is reported to the caller."""
REFUSED_S = 60.0
"""Seconds without a further change after a failed one: each try empties the node."""


@dataclass(frozen=True)
class ChangingNode:
    """Functions of the node that a role change uses.

    state    returns its current state; None while it loads
    drains   sets whether it takes no new work
    busy     returns whether its requests are running
    rejoin   ends the current state, makes that of the role that the engine has now, and joins"""

    state: Callable[[], NodeState | None]
    drains: Callable[[bool], None]
    busy: Callable[[], bool]
    rejoin: Callable[[str], Awaitable[None]]


class RoleChanges:
    """Role changes of one node, one at a time, on the asyncio loop.

    elastic    whether the node may change its role
    within_s   limit in seconds for requests to end; else the node keeps its role
    graphs_gb  see `ElasticEngine.switch_role`"""

    def __init__(
        self,
        engine: Engine,
        node: ChangingNode,
        metrics: WorkerMetrics,
        *,
        elastic: bool,
        within_s: float,
        graphs_gb: float = 0.0,
    ) -> None:
        self._engine = engine if elastic and isinstance(engine, ElasticEngine) else None
        self._node, self._metrics, self._within_s, self._graphs_gb = node, metrics, within_s, graphs_gb
        self._task: asyncio.Task[str] | None = None
        self._lock = asyncio.Lock()
        self._refused: tuple[float, str] | None = None
        self._ended = False

    async def post_role(self, request: Request) -> None:
        """Handle `POST /role`: begin a role change."""
        await self.begin(await read_message(request, ChangeRole))

    async def begin(self, change: ChangeRole) -> None:
        """Return once the node has begun to change, or if it has the role already.

        Raises InvalidRequest if it can never change, and RoleChangeRefused if it must not now, or if the change failed
        within ANSWER_S; it then continues as before."""
        if change.role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}; got {change.role!r}", param="role")
        if (engine := self._engine) is None:
            raise InvalidRequest("this node runs without --elastic", param="role")
        async with self._lock:
            task = await self._begun(engine, change)
        if task is not None:
            await asyncio.wait({task}, timeout=ANSWER_S)
            if task.done() and not task.cancelled() and (kept := task.result()):
                raise RoleChangeRefused(kept)

    async def stop(self) -> None:
        """Cancel a running change, because the node ends, and allow no further one."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _begun(self, engine: ElasticEngine, change: ChangeRole) -> asyncio.Task[str] | None:
        state = self._node.state()
        if state is None or self._task is not None or self._ended:
            raise RoleChangeRefused("the node is loading, changing its role or stopping")
        lease = state.lease()
        if change.role == lease.role:
            return None
        if 0 < lease.role_s < change.rest_s:
            raise RoleChangeRefused(f"it changed its role {lease.role_s:.0f} s ago")
        if self._refused is not None and (ago_s := time.monotonic() - self._refused[0]) < REFUSED_S:
            raise RoleChangeRefused(f"a change failed {ago_s:.0f} s ago: {self._refused[1]}")
        try:
            await engine.switch_role(lease.role, self._graphs_gb)
        except KvferryError as error:
            raise RoleChangeRefused(f"its engine cannot change its role: {error.message}") from error
        why = await state.membership.try_leave_role(change.rest_s)
        if why:
            self._metrics.role_changes["kept"].inc()
            raise RoleChangeRefused(why)
        if self._ended:
            raise RoleChangeRefused("the node is stopping")
        task = self._task = asyncio.create_task(self._change(engine, state, change.role), name="role-change")
        return task

    async def _change(self, engine: ElasticEngine, state: NodeState, role: str) -> str:
        """Change the role; return why the node keeps its old one, empty if it has the new one."""
        log.info("a %s node becomes a %s node", state.settings.role, role)
        kept = "the node is stopping"
        try:
            self._node.drains(True)
            await state.membership.announce()
            kept = await self._switched(engine, state, role)
            if not kept:
                await self._node.rejoin(role)
                self._metrics.role_changes["done"].inc()
                return ""
        except Exception as error:
            log.exception("the role could not be changed")
            kept = f"the change failed: {type(error).__name__} {error}"
            state.watch.end(kept)
        finally:
            self._task = None
            if kept and not state.watch.fault:
                self._node.drains(False)
                state.membership.keep_role()
        if not state.watch.fault:  # else the node ends
            self._refused = time.monotonic(), kept
            self._metrics.role_changes["kept"].inc()
            log.warning("the node stays a %s node: %s", state.settings.role, kept)
            await state.membership.announce()
        return kept

    async def _switched(self, engine: ElasticEngine, state: NodeState, role: str) -> str:
        """Change the engine once it is idle; return why it still has its old role, empty if it has the new one."""
        until = time.monotonic() + self._within_s
        while self._node.busy():
            if time.monotonic() > until:
                return f"its requests did not end within {self._within_s:g} s"
            await asyncio.sleep(CHECK_S)
        state.watch.stop()  # its checks are requests, with which the engine is not idle
        try:
            return await self._switched_idle(engine, state, role, until)
        finally:
            state.watch.start()

    async def _switched_idle(self, engine: ElasticEngine, state: NodeState, role: str, until: float) -> str:
        """Change an engine without requests of this node, as `_switched`; requests of other clients may still end."""
        while True:
            if not await state.membership.has_substitute():
                return f"no other {state.settings.role} node is ready any more"
            try:
                await self._set_role(engine, role)
                return ""
            except Overloaded as error:
                if time.monotonic() > until:
                    return error.message
            except KvferryError as error:
                log.warning("the engine did not become a %s engine: %s", role, error.message)
                await self._restore_role(engine, state, error)
                return error.message
            await asyncio.sleep(CHECK_S)

    async def _set_role(self, engine: ElasticEngine, role: str) -> None:
        """Tell the engine its role, and check that it has it. Raises KvferryError."""
        await engine.switch_role(role, self._graphs_gb)
        if (now := (await engine.facts()).kv_role) != role:
            raise StepFailed(f"the engine accepted the role {role}, but then reports {now or 'neither role'}")

    async def _restore_role(self, engine: ElasticEngine, state: NodeState, error: KvferryError) -> None:
        """Make sure that the engine has its old role; else it counts as gone.

        The engine makes changes in order, so this also undoes one whose answer came too late."""
        try:
            if isinstance(error, NodeDown):
                raise error
            await self._set_role(engine, state.settings.role)
        except KvferryError as failed:
            state.watch.end(f"it has no role after a failed change: {failed.message}")
