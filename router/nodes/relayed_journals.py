"""RelayedJournalScripts: calls the journals' scripts through nodes while the store does not answer this router."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from kvferry.cluster_state.journal_calls import Values
from kvferry.protocol.errors import KvferryError, RegistryUnavailable
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.relayed_journals import JournalAnswer, JournalCall
from kvferry.protocol.wire import WireError, pack
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable

log = logging.getLogger(__name__)

ANSWER_S = 0.6
"""Longest silence of a node that is asked, in seconds; it waits for the store for 0.4 s."""
ASKED = 2
"""Number of nodes that are asked for one call, one after another."""
MAX_CALLS = 32
"""Maximum number of calls at once. A node answers them in turns of its own, with the load of all routers."""
WAIT_S = ANSWER_S * ASKED
"""Longest wait of a call for others, in seconds."""


class RelayedJournalScripts:
    """Runs the scripts on connected nodes. Implements cluster_state.journal_calls.JournalScripts.

    The node that answered last is asked first. Beyond MAX_CALLS, calls wait in order of arrival for WAIT_S."""

    def __init__(self, table: NodeTable, client: NodeClient) -> None:
        self._table, self._client = table, client
        self._last = ""
        self._places = asyncio.Semaphore(MAX_CALLS)

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        body = pack(JournalCall(name, tuple(each if isinstance(each, bytes) else str(each).encode() for each in args)))
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise RegistryUnavailable(f"{MAX_CALLS} calls of nodes that could reach Redis are waiting") from error
        try:
            return await self._first_answer(body)
        finally:
            self._places.release()

    async def _first_answer(self, body: bytes) -> Values:
        failure: KvferryError = RegistryUnavailable("no node is connected that could reach Redis")
        for node in self._nodes():
            try:
                values = await self._call(node, body)
            except KvferryError as error:
                log.debug("%s relays no journals: %s", node.node_id, error)
                failure = error
            else:
                self._last = node.node_id
                return values
        if isinstance(failure, RegistryUnavailable):
            raise failure
        raise RegistryUnavailable(f"no node relays journals: {failure}") from failure

    def _nodes(self) -> list[NodeLease]:
        """Return the nodes to ask, those that may hang last."""
        entries = [entry for entry in self._table.entries.values() if entry.reachable]
        random.shuffle(entries)
        entries.sort(key=lambda entry: (entry.suspected, entry.key[0] != self._last))
        return [entry.lease for entry in entries[:ASKED]]

    async def _call(self, node: NodeLease, body: bytes) -> Values:
        answers: list[JournalAnswer] = []

        def deliver(message: object) -> None:
            if not isinstance(message, JournalAnswer):
                raise WireError(f"a {type(message).__name__} in an answer of journals")
            answers.append(message)

        await self._client.call(node, "POST /journals", body, ANSWER_S, None, deliver)
        if not answers:
            raise RegistryUnavailable(f"{node.node_id} gave no answer")
        return answers[-1].values
