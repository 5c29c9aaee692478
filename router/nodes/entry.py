"""One live node as this router knows it: its lease, what the router booked there, who listens to its token stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from placement.place import freed_per_s, spare_blocks
from placement.refusals import full, no_nodes
from placement.terms import NodeKey, NodeView
from protocol.errors import KvferryError, NodeLost
from protocol.layout import blocks_for
from protocol.lease import Load, NodeLease
from protocol.messages import AttemptFailed, StepFrame, TokenDelta

LEASE_LAG_POLLS = 3
"""Polls during which a lease may still describe the node as it was (renewed every second, polled twice a second)."""


def node_key(lease: NodeLease) -> NodeKey:
    return (lease.node_id, lease.epoch)


class Listener(Protocol):
    """Who listens to one request on a node's token stream. No call may block."""

    def delta(self, delta: TokenDelta) -> None:
        """New tokens, of any attempt of the request."""

    def failed(self, failure: AttemptFailed) -> None:
        """The node gave up an attempt."""

    def lost(self, error: KvferryError) -> None:
        """The stream broke: nothing more will come. The listener is detached."""


class Part(NamedTuple):
    """What one node adds to the Room: nodes of each role that are ready, blocks that may still be asked of it, blocks
    asked of it beyond what it takes, and blocks it gives back in a second."""

    prefills: int = 0
    decodes: int = 0
    spare_blocks: int = 0
    excess_blocks: int = 0
    freed_per_s: float = 0.0


class Room:
    """The sum of the parts of a model's nodes, kept at every change: whether anything can be placed is known without
    asking each node. `placed` counts the bookings ever made."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.total = Part()
        self.placed = 0

    def change(self, before: Part, after: Part) -> None:
        if before != after:
            own = self.total
            self.total = Part(
                own.prefills + after.prefills - before.prefills,
                own.decodes + after.decodes - before.decodes,
                own.spare_blocks + after.spare_blocks - before.spare_blocks,
                own.excess_blocks + after.excess_blocks - before.excess_blocks,
                own.freed_per_s + after.freed_per_s - before.freed_per_s,
            )

    def refusal(self) -> KvferryError | None:
        """Why a request that needs a decode node cannot be placed whatever its length; None if it may be."""
        if not self.total.decodes:
            return no_nodes(self.model)
        return None if self.total.spare_blocks else full(self.total.excess_blocks / self.total.freed_per_s)


@dataclass(slots=True, eq=False)
class Booking:
    """What one attempt was promised on one node, until `release`. `lost` is called once if the node is lost."""

    tokens: int
    blocks: int
    lost: Callable[[NodeLost], None]
    _entry: NodeEntry

    def settle(self) -> None:
        """The prompt is computed, or the blocks are in use: from now on the lease alone speaks for them."""
        self._entry.count(-self.tokens, -self.blocks, 0)
        self.tokens = self.blocks = 0

    def release(self) -> None:
        if self in self._entry.bookings:
            self._entry.bookings.remove(self)
            self._entry.count(-self.tokens, -self.blocks, -1)


class Book:
    """Sums of one node's bookings (tokens, blocks, requests), and the most they were while its lease could be written.

    A figure of the lease counts all routers' requests as they were up to `LEASE_LAG_POLLS` polls ago. What exceeds our
    own peak of that time belongs to others: figure with bookings = max(0, leased - own peak) + own now.
    """

    def __init__(self) -> None:
        self._now = (0, 0, 0)
        self._peak = (0, 0, 0)
        self._history: deque[tuple[int, int, int]] = deque(maxlen=LEASE_LAG_POLLS)
        self._leased_peak = (0, 0, 0)

    @property
    def empty(self) -> bool:
        return self._now == (0, 0, 0)

    def add(self, tokens: int, blocks: int, requests: int) -> None:
        self._now = (self._now[0] + tokens, self._now[1] + blocks, self._now[2] + requests)
        self._peak = _most((self._peak, self._now))

    def roll(self) -> None:
        """A lease was read."""
        if self._peak == self._leased_peak == (0, 0, 0):
            return
        self._history.append(self._peak)
        self._leased_peak = _most(self._history)
        self._peak = self._now

    def counted(self, tokens: int, blocks: int, requests: int) -> tuple[int, int, int]:
        """The lease's figures with the bookings counted once."""
        own, peak = self._now, self._leased_peak
        return (
            max(0, tokens - peak[0]) + own[0],
            max(0, blocks - peak[1]) + own[1],
            max(0, requests - peak[2]) + own[2],
        )


def _most(sums: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    tokens, blocks, requests = (max(column) for column in zip(*sums, strict=True))
    return (tokens, blocks, requests)


class NodeEntry:
    """`view` is the node as a placement sees it that reuses nothing there; `open` whether its token stream is;
    `suspected_until` the time before which nothing new goes to a prefill node, since a connection to it failed."""

    view: NodeView

    def __init__(self, lease: NodeLease, room: Room) -> None:
        self.key = node_key(lease)
        self.lease = lease
        self.open = False
        self.suspected_until = 0.0
        self.bookings: set[Booking] = set()
        self.listeners: dict[str, Listener] = {}
        self._book, self._room = Book(), room
        self._grouped, self._placed, self._part = False, 0, Part()
        self._figure()

    @property
    def idle(self) -> bool:
        """No booking and no listener is left."""
        return not self.bookings and not self.listeners and self._book.empty

    def reachable(self, now: float) -> bool:
        return self.open if self.lease.role == "decode" else self.suspected_until <= now

    def renew(self, lease: NodeLease) -> None:
        """The registry was read."""
        self._book.roll()
        self.lease = lease
        self._figure()

    def forget_load(self) -> None:
        """The lease is too old to tell what the node does now."""
        total = self.lease.load.total_blocks
        self.lease = replace(self.lease, load=Load(total_blocks=total, free_blocks=total))
        self._figure()

    def join(self, grouped: bool) -> None:
        """Whether the node belongs to the group that is placed on."""
        self._grouped = grouped
        self._figure()

    def promise(self, tokens: int, blocks: int, lost: Callable[[NodeLost], None]) -> Booking:
        """Book a request from now on."""
        booking = Booking(tokens, blocks, lost, self)
        self.bookings.add(booking)
        self._room.placed = self._placed = self._room.placed + 1
        self.count(tokens, blocks, 1)
        return booking

    def count(self, tokens: int, blocks: int, requests: int) -> None:
        self._book.add(tokens, blocks, requests)
        self._figure()

    def lose(self, error: NodeLost) -> None:
        """The node is gone: tell everyone who booked it."""
        self.join(False)
        for booking in list(self.bookings):
            booking.lost(error)

    def opened(self) -> None:
        """The token stream is accepted."""
        self.open = True
        self._figure()

    def deal(self, frame: StepFrame) -> None:
        """A frame of the token stream, for whom it concerns."""
        for delta in frame.deltas:
            if listener := self.listeners.get(delta.request_id):
                listener.delta(delta)
        for failure in frame.failed:
            if listener := self.listeners.get(failure.request_id):
                listener.failed(failure)

    def broken(self, error: KvferryError) -> None:
        """The token stream ended."""
        self.open = False
        self._figure()
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.lost(error)

    def _figure(self) -> None:
        lease, load = self.lease, self.lease.load
        queued = blocks_for(load.waiting_tokens, lease.block_size) if lease.role == "decode" else 0
        tokens, blocks, requests = self._book.counted(
            load.waiting_tokens, load.granted_blocks + queued, load.running_requests + load.waiting_requests
        )
        self.view = NodeView(lease, 0, tokens, requests, blocks, self._placed)
        part = self._part_now()
        self._room.change(self._part, part)
        self._part = part

    def _part_now(self) -> Part:
        if not self._grouped or self.lease.state != "ready":
            return Part()
        if self.lease.role == "prefill":
            return Part(prefills=1)
        spare = spare_blocks(self.view)
        return Part(0, 1, max(0, spare), max(0, -spare), freed_per_s(self.view)) if self.open else Part()
