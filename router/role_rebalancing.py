"""RoleRebalancer (`--elastic`): asks nodes to change roles when a model's prefill and decode pools are unbalanced.

Any router may request a change. The nodes ensure that changes happen one at a time, that each role keeps a node, and
that the next change waits for a minimum time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager

from kvferry.placement.role_balance import Change, Demands, backlog_s, role_change
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.lease import NodeLease
from kvferry.router.api.served_models import ServedModel
from kvferry.runtime.background import background

log = logging.getLogger(__name__)

CHECK_S, HOLD_S = 0.5, 3.0
"""Interval of checks, and time for which a change must be useful before it is requested, in seconds."""

Ask = Callable[[NodeLease, str, float], Awaitable[None]]
"""Asks a node to take a role unless roles changed within the given seconds; raises KvferryError."""


class RoleRebalancer:
    """Role rebalancing of one router, over all its models; rest_s: minimum number of seconds between changes."""

    def __init__(
        self, pools: Iterable[ServedModel], ask: Ask, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools, self._ask, self._rest_s, self._clock = list(pools), ask, rest_s, clock
        self._since: dict[str, tuple[str, float]] = {}

    async def check(self) -> None:
        """Check all models once, and request changes that have been useful for HOLD_S."""
        for pool in self._pools:
            change = self._useful_change(pool)
            role = change.role if change else ""
            known, since = self._since.get(pool.name, ("", 0.0))
            if role != known:
                self._since[pool.name] = (role, self._clock())
            elif change is not None and self._clock() - since >= HOLD_S:
                del self._since[pool.name]
                await self._request_change(change)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Check regularly until the end of the block."""
        return background(self._run(), "balance")

    def _useful_change(self, pool: ServedModel) -> Change | None:
        """Return a useful change among nodes of one fingerprint, since only they form pairs.

        Each fingerprint's nodes get their share of the requests that wait in this router."""
        leases, backlog = pool.cluster.leases(), pool.backlog
        backlog_in_router_s, extra_nodes = (backlog.prefill_s(), backlog.decode_nodes()) if backlog else (0.0, 0.0)
        for fingerprint in sorted({lease.fingerprint for lease in leases}):
            group = [lease for lease in leases if lease.fingerprint == fingerprint]
            share = len(group) / len(leases)
            demands = Demands(
                backlog_s(group) + share * backlog_in_router_s,
                sum(lease.pressure for lease in group) + share * extra_nodes,
            )
            if change := role_change(group, demands, self._rest_s):
                return change
        return None

    async def _request_change(self, change: Change) -> None:
        node = change.node
        try:
            await self._ask(node, change.role, change.rest_s)
        except KvferryError as error:
            log.info("%s stays a %s node: %s", node.node_id, node.role, error)
        else:
            log.info("%s, a %s node, will become a %s node", node.node_id, node.role, change.role)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.check()
            except Exception:
                log.exception("the roles of the nodes could not be balanced")
