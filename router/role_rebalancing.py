"""RoleRebalancer (`--elastic`): asks nodes to change roles when a model's prefill and decode pools are unbalanced.

Any router may ask. The nodes ensure that changes happen one at a time, that each role keeps a node, and that roles rest
after a change."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager

from kvferry.placement.role_balance import Change, Demands, backlog_s, wanted
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.lease import NodeLease
from kvferry.router.api.served_models import ServedModel
from kvferry.runtime.background import background

log = logging.getLogger(__name__)

LOOK_S, HOLD_S = 0.5, 3.0
"""Interval of checks, and time for which a change must be wanted so that a burst causes none, in seconds."""

Ask = Callable[[NodeLease, str, float], Awaitable[None]]
"""Asks a node to take a role if roles have rested for the given seconds; raises KvferryError."""


class RoleRebalancer:
    """Role rebalancing of one router, over all its models; roles rest for `rest_s` seconds after a change."""

    def __init__(
        self, pools: Iterable[ServedModel], ask: Ask, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools, self._ask, self._rest_s, self._clock = list(pools), ask, rest_s, clock
        self._since: dict[str, tuple[str, float]] = {}

    async def look(self) -> None:
        """Check all models once, and ask for changes that have been wanted long enough."""
        for pool in self._pools:
            change = self._wanted(pool)
            role = change.role if change else ""
            known, since = self._since.get(pool.name, ("", 0.0))
            if role != known:
                self._since[pool.name] = (role, self._clock())
            elif change is not None and self._clock() - since >= HOLD_S:
                del self._since[pool.name]
                await self._make(change)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Check regularly until the end of the block."""
        return background(self._run(), "balance")

    def _wanted(self, pool: ServedModel) -> Change | None:
        """Return a change within one fingerprint: only nodes that share it form pairs.

        Each fingerprint's nodes get their share of what waits in this router."""
        leases, own = pool.cluster.leases(), pool.backlog
        waits_s, seats = (own.prefill_s(), own.decode_nodes()) if own else (0.0, 0.0)
        for fingerprint in sorted({lease.fingerprint for lease in leases}):
            alike = [lease for lease in leases if lease.fingerprint == fingerprint]
            share = len(alike) / len(leases)
            asked = Demands(backlog_s(alike) + share * waits_s, sum(lease.pressure for lease in alike) + share * seats)
            if change := wanted(alike, asked, self._rest_s):
                return change
        return None

    async def _make(self, change: Change) -> None:
        node = change.node
        try:
            await self._ask(node, change.role, change.rest_s)
        except KvferryError as error:
            log.info("%s stays a %s node: %s", node.node_id, node.role, error)
        else:
            log.info("%s, a %s node, will become a %s node", node.node_id, node.role, change.role)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                log.exception("the roles of the nodes could not be balanced")
