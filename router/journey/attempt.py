"""One try at a request on a chosen placement: its bookings, its place on the token stream, its call to a node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from placement.terms import Placement
from process.tracing import TRACER
from protocol.errors import KvferryError, NodeLost, from_body
from protocol.layout import blocks_for
from protocol.lease import NodeLease
from protocol.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    GenerateRequest,
    Job,
    PrefillRequest,
    ShipDone,
    TokenDelta,
)
from router.journey.ladder import Failure, blamed
from router.nodes.client import NodeClient
from router.nodes.entry import Booking, NodeEntry

log = logging.getLogger(__name__)

Event = TokenDelta | Failure
TAIL_S = 5.0
"""How long the prefill node's answer may outlive its request before the connection is closed."""


class Errands:
    """Calls that nobody waits for (cancels, tails of answers). Held here so that they run to their end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def open(self) -> int:
        return len(self._tasks)

    async def finish(self, limit_s: float) -> None:
        """Wait for all, then drop the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Attempt:
    """Launched on construction, over after `close`. In between it posts TokenDeltas of this attempt and at most one
    Failure; nothing is posted after `close`. Never raises for a node's fault.

    prefill, decode   the entries of the placement's nodes, alive and reachable since nothing was awaited meanwhile
    suspect           told of a node to which a connection failed
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        post: Callable[[Event], None],
        *,
        prefill: NodeEntry | None,
        decode: NodeEntry | None,
        suspect: Callable[[NodeEntry], None],
        client: NodeClient,
        errands: Errands,
    ) -> None:
        self._span = TRACER.start("attempt", job.trace, number=job.attempt, expected_cached=placement.cached_len)
        self._span.tell(prefill=_name(placement.prefill), decode=_name(placement.decode))
        self.job = job if self._span.trace == job.trace else replace(job, trace=self._span.trace)
        self.placement = placement
        self._launched_at = time.monotonic()
        self._post, self._suspect, self._client, self._errands = post, suspect, client, errands
        self._prefill_node, self._decode_node = prefill, decode
        self._over = self._closed = self._first_seen = self._prefilled = self._decoding = False
        self._error = ""
        self._bookings: dict[str, Booking] = {}
        self._book()
        if decode:
            decode.listeners[job.request_id] = self
        self._task = errands.send(self._prefill(prefill) if prefill else self._generate())

    def close(self, *, cancel: bool) -> None:
        """Give everything back. `cancel`: the request has not ended, so tell the nodes to drop it."""
        if self._closed:
            return
        self._over = self._closed = True
        self._span.end((self._error or "cancelled") if cancel else "")
        for booking in self._bookings.values():
            booking.release()
        self._bookings = {}
        if self._decode_node:
            self._decode_node.listeners.pop(self.job.request_id, None)
        if cancel:
            self._task.cancel()
            for node in self._involved():
                self._errands.send(self._cancel(node))
        elif not self._task.done():
            timer = asyncio.get_running_loop().call_later(TAIL_S, self._task.cancel)
            self._task.add_done_callback(lambda _: timer.cancel())

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._launched_at

    def stall(self) -> None:
        """No token came within the attempt's share of the deadline: give it up."""
        place = self.placement
        node = place.decode if self._first_seen else place.prefill or place.decode
        self._fail(NodeLost("no token within the attempt's share of the deadline"), node or place.prefill)

    def delta(self, delta: TokenDelta) -> None:
        if delta.attempt != self.job.attempt or self._over:
            return
        if not self._decoding:
            self._decoding = True
            self._settle("decode")
        self._post(delta)

    def failed(self, failure: AttemptFailed) -> None:
        assert self.placement.decode
        if failure.attempt == self.job.attempt:
            self._reported(_error(failure), self.placement.decode)

    def lost(self, error: KvferryError) -> None:
        self._fail(error, self.placement.decode)

    def _book(self) -> None:
        """A prefill node is booked for the prompt's tokens, a decode node for its blocks until it runs there; both for
        the request."""
        total = len(self.job.token_ids)
        uncached = max(0, total - self.placement.cached_len)
        if prefill := self._prefill_node:
            self._bookings["prefill"] = prefill.promise(uncached, 0, self._prefill_lost)
        if decode := self._decode_node:
            blocks = blocks_for(total + 1, decode.lease.block_size)
            self._bookings["decode"] = decode.promise(0 if prefill else uncached, blocks, self.lost)

    def _settle(self, role: str) -> None:
        if booking := self._bookings.get(role):
            booking.settle()

    def _prefill_lost(self, error: NodeLost) -> None:
        assert self.placement.prefill
        self._reported(error, self.placement.prefill)

    def _reported(self, error: KvferryError, reporter: NodeLease) -> None:
        """A node's answer was an error: post it, unless the prefill node reports after it had done its part."""
        if not (reporter.role == "prefill" and self._first_seen and (self._decoding or self._prefilled)):
            self._fail(error, blamed(error, reporter, self.placement))

    def _fail(self, error: KvferryError, node: NodeLease | None) -> None:
        assert node
        if not self._over:
            self._over, self._error = True, error.code
            self._post(Failure(self.job.attempt, error, node))

    async def _prefill(self, node: NodeEntry) -> None:
        decode = self.placement.decode
        request = PrefillRequest(self.job, decode.target if decode else None)
        try:
            await self._client.prefill(node.lease, request, self._answer)
        except Exception as error:
            self._unreachable(_known(error, node.lease), node)
            return
        if not self._prefilled:
            self._reported(NodeLost(f"{node.lease.node_id} ended its answer early"), node.lease)

    async def _generate(self) -> None:
        node = self._decode_node
        assert node
        try:
            await self._client.generate(node.lease, GenerateRequest(self.job))
        except Exception as error:
            self._unreachable(_known(error, node.lease), node)

    def _unreachable(self, error: KvferryError, node: NodeEntry) -> None:
        if isinstance(error, NodeLost) and not self._over:
            self._suspect(node)
        self._reported(error, node.lease)

    def _answer(self, message: Any) -> None:
        """A message of the prefill node's answer."""
        if isinstance(message, FirstToken):
            self._first_seen = True
            self._settle("prefill")
            self._prefilled = message.delta.finish_reason is not None
            if not self._over:
                self._post(message.delta)
        elif isinstance(message, ShipDone):
            self._prefilled = True
            if booking := self._bookings.pop("prefill", None):
                booking.release()
            log.debug(
                "%s shipped %d blocks in %.4f s, %.4f s exposed",
                message.request_id, message.blocks, message.ship_s, message.exposed_s,
            )  # fmt: skip
        elif isinstance(message, AttemptFailed):
            assert self.placement.prefill
            self._reported(_error(message), self.placement.prefill)

    def _involved(self) -> list[NodeLease]:
        place = self.placement
        return [node for node in (None if self._prefilled else place.prefill, place.decode) if node]

    async def _cancel(self, node: NodeLease) -> None:
        """Tell the node, twice if need be; one that cannot be told drops the request by its broken connection."""
        for _ in range(2):
            with contextlib.suppress(KvferryError):
                await self._client.cancel(node, CancelRequest(self.job.request_id, self.job.attempt))
                return


def _name(node: NodeLease | None) -> str:
    return node.node_id if node else ""


def _error(failure: AttemptFailed) -> KvferryError:
    return from_body({"error": {"code": failure.code, "message": failure.message}})


def _known(error: Exception, node: NodeLease) -> KvferryError:
    """The error, or one in place of a mistake of our own: a request that waits for an answer must get one."""
    if isinstance(error, KvferryError):
        return error
    log.error("the call to %s failed", node.node_id, exc_info=error)
    return KvferryError("internal error of the router; its log has the details")
