"""One placed request: its endpoints, and its share of a node's load until the response ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.dispatch.prefixes import Remembered
from kvferry.router.nodes.node_entry import NodeEntry

log = logging.getLogger(__name__)

GATEWAY_ERRORS = (502, 503, 504)
"""Statuses by which a gateway or engine reports that an endpoint did not answer."""


class Pick:
    """Endpoints of a request, the best first, with a reservation on the node that has it; the owner must call `end`.

    Until the response begins, other placements count its prompt as computed there soon. If the gateway used another of
    the endpoints, the reservation moves to that node.

    endpoints   as ip:port
    cached_len  prompt tokens that the first node was expected to reuse
    """

    def __init__(
        self,
        cluster: ModelCluster,
        remembered: Remembered,
        nodes: Sequence[tuple[NodeEntry, str]],
        hashes: Mapping[str, Sequence[bytes]],
        cached_len: int,
        uncached: int,
        blocks: int,
    ) -> None:
        self.endpoints = tuple(endpoint for _, endpoint in nodes)
        self.cached_len = cached_len
        self._cluster, self._remembered, self._hashes = cluster, remembered, hashes
        self._entries = {endpoint: entry for entry, endpoint in nodes}
        self._amounts = (uncached, blocks)
        self._endpoint = self.endpoints[0]
        self._has_begun = self._has_ended = False
        self._book()

    @property
    def node_id(self) -> str:
        """Return the id of the node that has the request, as far as known."""
        return self._entries[self._endpoint].key[0]

    def served(self, endpoint: str) -> None:
        """Record which endpoint the gateway used; an unknown one changes nothing."""
        if self._has_ended or endpoint == self._endpoint or endpoint not in self._entries:
            return
        log.info("%s did not take a request; it went to %s", self._endpoint, endpoint)
        self._cluster.nodes.suspect(self._entries[self._endpoint])
        self._release()
        self._endpoint = endpoint
        self._book()

    def began(self, status: int) -> None:
        """Record the response's head: unless it is an error, the prompt is computed and its blocks are in use."""
        if self._has_ended or self._has_begun:
            return
        self._has_begun = True
        entry = self._entries[self._endpoint]
        if status in GATEWAY_ERRORS:
            self._cluster.nodes.suspect(entry)
        elif status < 400:
            hashes = self._hashes.get(entry.lease.fingerprint, ())
            self._remembered.note(hashes, (entry.key,))
            self._cluster.remember(hashes, (entry.lease,))
            self._cluster.nodes.breakers.node_works(entry.key)
        self._expected.remove()
        self._booking.settle()

    def end(self) -> None:
        """Release the node; may be called repeatedly."""
        if not self._has_ended:
            self._has_ended = True
            self._release()

    def _book(self) -> None:
        entry, breakers = self._entries[self._endpoint], self._cluster.nodes.breakers
        if breakers.any:
            breakers.use(None, entry.key)
        self._expected = self._cluster.inflight_prefixes.sent(self._hashes.get(entry.lease.fingerprint, ()), entry.key)
        self._booking = entry.reserve(*self._amounts, lambda error: log.info("a request's node is lost: %s", error))

    def _release(self) -> None:
        self._expected.remove()
        self._booking.release()
