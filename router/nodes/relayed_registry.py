"""RelayedRegistry: reads the nodes' leases through nodes while the registry does not answer this router.

A router that is cut off from the registry alone thus learns of nodes that start, restart and drain. If the registry is
away for all, it still learns of a node that restarts at its address, or returns after it was lost, since each node
also tells its own lease."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.relayed_leases import RelayedLeases
from kvferry.protocol.wire import WireError
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable
from kvferry.runtime.background import end

log = logging.getLogger(__name__)

SILENT_S = 1.0
"""Time without an answer of the registry after which nodes are asked, in seconds: two polls."""
PERIOD_S, NODE_PERIOD_S = 0.5, 0.002
"""Shortest time between two rounds of questions, and the least for each known node, in seconds."""
SILENCE_S, ANSWER_S = 1.0, 3.0
"""Longest silence of a node that is asked, and longest time of its whole answer, in seconds."""
ASKED, PROBED = 2, 4
"""Number of connected nodes that each round asks, and of addresses of unconnected ones, which take turns."""
LOST_S = 30.0
"""Time for which a lost node's address is asked, in seconds: it may have been cut off, and the registry away since."""
MAX_RECORDS = 2**14
"""Maximum number of leases that are read of a round's answers."""


class SealedLeases(Protocol):
    """Reader of the registry's records."""

    def unsealed(self, records: Sequence[bytes]) -> list[NodeLease]:
        """Return the leases in these records that are authentic, not outdated, and usable by this process."""


class RelayedRegistry:
    """Passes leases that nodes relay to the node table, from `start` to `stop`."""

    def __init__(self, table: NodeTable, client: NodeClient, reader: SealedLeases) -> None:
        self._table, self._client, self._reader = table, client, reader
        self._probed = 0
        self._recent = dict[str, tuple[NodeLease, float]]()
        """Last lease of each node, and when the table still had it: one that was lost may live on."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask nodes whenever the registry is silent."""
        self._task = asyncio.create_task(self._follow(), name="relayed-registry")

    async def stop(self) -> None:
        """Stop asking."""
        if self._task is not None:
            await end(self._task)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(max(PERIOD_S, NODE_PERIOD_S * len(self._table.entries)))
            try:
                self._remember()
                if self._is_needed:
                    await self._ask()
            except Exception:
                log.exception("the leases that nodes relay could not be read")

    @property
    def _is_needed(self) -> bool:
        return self._table.registry_health.silent_s >= SILENT_S

    async def _ask(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._relayed_by(node)) for node in self._next_nodes()]
        answers = [task.result() for task in tasks]
        records = list(dict.fromkeys(chain.from_iterable(answers)))[:MAX_RECORDS]
        leases = self._reader.unsealed(records)
        if leases and self._is_needed:
            self._table.learn(leases)

    def _remember(self) -> None:
        now = self._table.clock()
        self._recent |= {entry.lease.node_id: (entry.lease, now) for entry in self._table.entries.values()}
        for node_id in [each for each, (_, seen_at) in self._recent.items() if now - seen_at > LOST_S]:
            del self._recent[node_id]

    def _next_nodes(self) -> list[NodeLease]:
        """Return the nodes to ask: some that are connected, and the next of those that may be back."""
        entries = self._table.entries.values()
        connected = [entry.lease for entry in entries if entry.reachable]
        others = [entry.lease for entry in entries if not entry.reachable]
        known = {entry.lease.node_id for entry in entries}
        others += [lease for node_id, (lease, _) in self._recent.items() if node_id not in known]
        first = self._probed % len(others) if others else 0
        self._probed = first + PROBED
        return random.sample(connected, min(ASKED, len(connected))) + (others[first:] + others[:first])[:PROBED]

    async def _relayed_by(self, node: NodeLease) -> tuple[bytes, ...]:
        """Return a node's answer; nothing if it does not answer, or is of a version that relays nothing."""
        records: tuple[bytes, ...] = ()

        def deliver(message: object) -> None:
            nonlocal records
            if not isinstance(message, RelayedLeases):
                raise WireError(f"a {type(message).__name__} in an answer of leases")
            records = message.records

        try:
            async with asyncio.timeout(ANSWER_S):
                await self._client.call(node, "GET /leases", b"", SILENCE_S, None, deliver)
        except (KvferryError, TimeoutError) as error:
            log.debug("%s relays no leases: %s", node.node_id, error or "no whole answer in time")
        except Exception:  # it must not cost what the other nodes relay
            log.exception("the leases that %s relays could not be read", node.node_id)
        return records
