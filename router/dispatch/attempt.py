"""Attempt: one try to run a request on chosen nodes: reserves them, calls them and receives the tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kvferry.placement.types import NodeKey, Placement
from kvferry.protocol.errors import BlocksCorrupt, Incompatible, KvferryError, NodeLost
from kvferry.protocol.fast_init import replaced
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    GenerateRequest,
    Job,
    PrefillRequest,
    ShipDone,
    TokenDelta,
)
from kvferry.router.dispatch.attempt_calls import AttemptCalls
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.dispatch.events import Event, NodeDrains, NodeSuspected
from kvferry.router.dispatch.failures import error_of, failure, known, nodes_at_fault
from kvferry.router.dispatch.inflight_prefixes import ExpectedPrefix
from kvferry.router.nodes.circuit_breakers import CircuitBreakers
from kvferry.router.nodes.message_validation import suits
from kvferry.router.nodes.node_entry import NodeEntry, Reservation, node_key
from kvferry.router.request_log import RequestLog
from kvferry.runtime.tracing import TRACER

TAIL_S = 5.0
"""Longest time the prefill node's answer may continue after its request ended, in seconds."""


class Attempt:
    """One attempt, launched on construction and over after `close`.

    It posts its TokenDeltas and at most one Failure until then, and never raises for a fault of a node.

    prefill, decode  entries of the placement's nodes, alive and reachable since nothing was awaited after placement
    expected         record of its prompt's blocks, which other placements see until they are computed
    breakers         receives failures and successes of nodes and pairs
    decoding         true once tokens came from the decode node
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        post: Callable[[Event], None],
        *,
        prefill: NodeEntry | None,
        decode: NodeEntry | None,
        breakers: CircuitBreakers,
        client: AttemptCalls,
        background_calls: BackgroundCalls,
        request_log: RequestLog,
        expected: ExpectedPrefix,
    ) -> None:
        self._span = TRACER.start("attempt", job.trace, number=job.attempt, expected_cached=placement.cached_len)
        names = [node.node_id if node else "" for node in (placement.prefill, placement.decode)]
        self._span.set_attributes(prefill=names[0], decode=names[1])
        self.job = job if self._span.trace == job.trace else replaced(job, trace=self._span.trace)
        self.placement = placement
        self._post, self._breakers, self._client, self._background_calls = post, breakers, client, background_calls
        self._prefill_node, self.decode_node, self._request_log, self._expected = prefill, decode, request_log, expected
        self._over = self._first_seen = self._prefilled = self.decoding = False
        self._error, self._launched_at = "", time.monotonic()
        self._bookings: dict[str, Reservation] = {}
        self._book()
        if breakers.any:
            breakers.use(prefill.key if prefill else None, decode.key if decode else None)
        if decode:
            decode.listeners[job.request_id] = self
        self._task: asyncio.Task[None] | None = background_calls.send_now(self._begin())

    def close(self, *, cancel: bool) -> None:
        """Release everything; `cancel` also makes the nodes drop the unfinished request."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._over, self._post = True, lambda _: None
        self._span.end((self._error or "cancelled") if cancel else "")
        for booking in self._bookings.values():
            booking.release()
        self._bookings = {}
        self._expected.remove()
        if self.decode_node:
            self.decode_node.listeners.pop(self.job.request_id, None)
        if cancel:
            task.cancel()
            drop = CancelRequest(self.job.request_id, self.job.attempt)
            for node in filter(None, (None if self._prefilled else self.placement.prefill, self.placement.decode)):
                self._background_calls.send(self._client.drop(node, drop))
        else:
            self._background_calls.limit(task, TAIL_S)

    @property
    def age_s(self) -> float:
        """Return the seconds since the launch."""
        return time.monotonic() - self._launched_at

    @property
    def suspects(self) -> frozenset[NodeKey]:
        """Return the nodes that the attempt waits for and that may hang, or whose links may."""
        prefill, decode = self._prefill_node, self.decode_node
        waits = decode, None if prefill and self._has_finished(prefill.lease) else prefill
        ships = None not in waits and not self._prefilled
        return frozenset(node.key for node in waits if node and (node.suspected or (ships and node.link_suspected)))

    @property
    def ships(self) -> bool:
        """Return whether the first token has arrived, and the decode node has not begun to stream."""
        return self._first_seen and not self.decoding and self.decode_node is not None

    def stall(self, *, at_fault: bool) -> None:
        """Fail the attempt: no token came within its share of the deadline. at_fault: its node is to blame."""
        error, place = NodeLost("no token within the attempt's share of the deadline"), self.placement
        node = place.decode if self._first_seen else place.prefill or place.decode
        self._unreachable(error, node or place.prefill, at_fault=at_fault)

    def delta(self, delta: TokenDelta) -> None:
        """Handle a token delta from the decode node's stream."""
        if delta.attempt != self.job.attempt or self._over:
            return
        if not suits(delta, self.job):
            self._invalid_message(self.placement.decode)
            return
        if not self.decoding:
            self.decoding = True
            self._settle("decode")
            if self._breakers.any:
                self._breakers.decodes(self.placement)
        self._post(delta)

    def failed(self, failure: AttemptFailed) -> None:
        """Handle a failure that the decode node reported for this attempt."""
        assert self.placement.decode
        if failure.attempt == self.job.attempt:
            self._reported(error_of(failure), self.placement.decode)

    def lost(self, error: KvferryError) -> None:
        """Fail the attempt: the decode node or its stream is lost."""
        assert self.placement.decode
        self._fail(error, self.placement.decode)

    def drains(self) -> None:
        """Post that the decode node drains."""
        if not self._over:
            self._post(NodeDrains(self.job.attempt))

    def _book(self) -> None:
        """Reserve the prompt's tokens on the prefill node and the blocks on the decode node, until they are in use."""
        total = len(self.job.token_ids)
        uncached = max(0, total - self.placement.cached_len)
        if prefill := self._prefill_node:
            self._bookings["prefill"] = prefill.reserve(uncached, 0, self._prefill_lost, self._suspect)
        if decode := self.decode_node:
            blocks = decode.lease.blocks_with(blocks_for(total + 1, decode.lease.block_size))
            self._bookings["decode"] = decode.reserve(0 if prefill else uncached, blocks, self.lost, self._suspect)

    def _settle(self, role: str) -> None:
        if booking := self._bookings.get(role):
            booking.settle()
        self._expected.remove()

    def _suspect(self) -> None:
        if not self._over:
            self._post(NodeSuspected(self.job.attempt))

    def _prefill_lost(self, error: NodeLost) -> None:
        """Fail the attempt if the prefill node's lease ended before its part was done."""
        assert self.placement.prefill
        if not self._has_finished(self.placement.prefill):
            self._fail(error, self.placement.prefill)

    def _reported(self, error: KvferryError, reporter: NodeLease) -> None:
        """Post an error that a node reported, unless the prefill node had already done its part."""
        if self._has_finished(reporter):
            return
        at_fault = nodes_at_fault(error, reporter, self.placement, decoding=self.decoding)
        if len(at_fault) == 2 and not self._over:
            prefill, decode = map(node_key, at_fault)
            self._breakers.pair_failed(prefill, decode, certain=isinstance(error, NodeLost | Incompatible))
            if isinstance(error, BlocksCorrupt):
                self._breakers.corrupt(prefill, decode)
        self._fail(error, *at_fault)

    def _unreachable(self, error: KvferryError, node: NodeLease | None, *, at_fault: bool = True) -> None:
        """Fail the attempt: a node does not answer, or a call to it failed."""
        assert node
        if self._has_finished(node):
            return
        if at_fault and isinstance(error, NodeLost) and not self._over:
            self._breakers.node_failed(node_key(node))
        self._fail(error, node)

    def _has_finished(self, node: NodeLease) -> bool:
        return node.role == "prefill" and self._first_seen and (self.decoding or self._prefilled)

    def _fail(self, error: KvferryError, *at_fault: NodeLease) -> None:
        if not self._over:
            self._over, self._error = True, error.code
            self._post(failure(self.job.attempt, error, at_fault, self.placement, decoding=self.decoding))

    async def _begin(self) -> None:
        node = self._prefill_node or self.decode_node
        assert node
        lease, decode = node.lease, self.placement.decode  # the lease may have another role when the call ends
        try:
            if self._prefill_node is None:
                await self._client.generate(lease, GenerateRequest(self.job))
                return
            await self._client.prefill(lease, PrefillRequest(self.job, decode.target if decode else None), self._answer)
        except Exception as error:
            reported = known(error, lease)
            (self._unreachable if isinstance(reported, NodeLost) else self._reported)(reported, lease)
            return
        if not self._prefilled:
            self._unreachable(NodeLost(f"{lease.node_id} ended its response early"), lease)

    def _answer(self, message: Any) -> None:
        """Handle a message of the prefill node's answer."""
        if isinstance(message, FirstToken) and not suits(message.delta, self.job):
            self._invalid_message(self.placement.prefill)
        elif isinstance(message, FirstToken):
            self._first_seen = True
            self._settle("prefill")
            if self._breakers.any and self.placement.prefill:
                self._breakers.node_works(node_key(self.placement.prefill))
            self._prefilled = message.delta.finish_reason is not None
            if not self._over:
                self._post(message.delta)
        elif isinstance(message, ShipDone):
            self._prefilled = True
            if booking := self._bookings.pop("prefill", None):
                booking.release()
            self._request_log.shipped(self.placement, message)
        elif isinstance(message, AttemptFailed):
            assert self.placement.prefill
            self._reported(error_of(message), self.placement.prefill)

    def _invalid_message(self, node: NodeLease | None) -> None:
        assert node
        self._fail(NodeLost("a node sent an answer of the wrong type"), node)
