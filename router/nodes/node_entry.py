"""NodeEntry: one live node: its lease, this router's reservations, stream listeners, and whether it may hang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvferry.placement.blocks import freed_per_s
from kvferry.placement.types import NodeKey, NodeView
from kvferry.protocol.errors import KvferryError, NodeLost
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import Load, NodeLease
from kvferry.protocol.messages import AttemptFailed, Pulse, StepFrame, TokenDelta
from kvferry.router.nodes.capacity_summary import CapacitySummary, Part
from kvferry.router.nodes.reservations import Reservations

log = logging.getLogger(__name__)

STALL_S, STALL = 2.0, 10.0
"""A step hangs if it takes longer than STALL_S seconds and than STALL times the node's usual step."""
SUSPECT_S, SUSPECT = 0.8, 5.0
"""A node is suspected while a step takes longer than SUSPECT_S seconds and than SUSPECT times the node's usual step.

Its link is suspected while one turn of the link's thread takes longer than SUSPECT_S."""


def node_key(lease: NodeLease) -> NodeKey:
    """Return the key of a node's process: its id and epoch."""
    return (lease.node_id, lease.epoch)


def ignored() -> None:
    """Do nothing."""


class Listener(Protocol):
    """Listener for one request on a node's token stream; calls must not block."""

    def delta(self, delta: TokenDelta) -> None:
        """Receive new tokens, of any attempt of the request."""

    def failed(self, failure: AttemptFailed) -> None:
        """Receive the failure of an attempt on the node."""

    def lost(self, error: KvferryError) -> None:
        """Handle a broken stream; the listener is detached."""

    def drains(self) -> None:
        """Handle that the node begins to drain, so that the stream should move."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Reservation of one attempt on one node, until `release`.

    lost       called once if the node is lost
    suspected  called whenever the node or its link begins to be suspected
    """

    tokens: int
    blocks: int
    lost: Callable[[NodeLost], None]
    suspected: Callable[[], None]
    _entry: NodeEntry

    def settle(self) -> None:
        """Drop the amounts: the prompt is computed or the blocks are in use, so the lease counts them."""
        self._entry._count(-self.tokens, -self.blocks, 0)
        self.tokens = self.blocks = 0

    def release(self) -> None:
        """End the reservation; may be called repeatedly."""
        if self in self._entry.bookings:
            del self._entry.bookings[self]
            self._entry._count(-self.tokens, -self.blocks, -1)


class NodeEntry:
    """Live node, with its load and the state of its token stream.

    view       the node as placement sees it, without reuse
    open       true while the token stream is open
    linked     true while the stream is open or may resume without loss
    stalled    true while a thread of the node hangs
    suspected  true while the node may hang: its stream is silent, or a step takes long
    link_suspected  true while its link may hang; streams that decode need no link
    reachable  true if its stream shows that the node processes requests
    corrupt    called for each corrupt transfer to this node, with sender and receiver
    """

    def __init__(
        self,
        lease: NodeLease,
        room: CapacitySummary,
        corrupt: Callable[[NodeKey, NodeKey], None] = lambda sender, here: None,
    ) -> None:
        self.key = node_key(lease)
        self.lease = lease
        self.open = self.linked = self.stalled = self.suspected = self.link_suspected = self.reachable = False
        self.bookings: dict[Reservation, None] = {}
        self.listeners: dict[str, Listener] = {}
        self._book, self._room, self._corrupt = Reservations(), room, corrupt
        self._grouped, self._placed, self._part = False, 0, Part()
        self._changed()

    @property
    def view(self) -> NodeView:
        """Return the node as placement sees it, after pending updates."""
        self._room.figure()
        return self._view

    @property
    def idle(self) -> bool:
        """Return whether no reservation and no listener is left."""
        return not self.bookings and not self.listeners and self._book.empty

    @property
    def drains(self) -> bool:
        """Return whether the node drains."""
        return self.lease.state == "draining"

    def renew(self, lease: NodeLease) -> None:
        """Update the lease after a read of the registry, and notify listeners when draining begins."""
        self._book.roll()
        began, self.lease = lease.state != self.lease.state, lease
        self._changed()
        if began and self.drains:
            for listener in list(self.listeners.values()):
                listener.drains()

    def forget_load(self) -> None:
        """Clear the load of a lease that is too old to describe the node."""
        total = self.lease.load.total_blocks
        self.lease = replace(self.lease, load=Load(total_blocks=total, free_blocks=total))
        self._changed()

    def join(self, grouped: bool) -> None:
        """Set whether placement may use the node."""
        self._grouped = grouped
        self._changed()

    def promise(
        self, tokens: int, blocks: int, lost: Callable[[NodeLost], None], suspected: Callable[[], None] = ignored
    ) -> Reservation:
        """Reserve capacity for an attempt; see Reservation."""
        booking = Reservation(tokens, blocks, lost, suspected, self)
        self.bookings[booking] = None
        self._room.placed = self._placed = self._room.placed + 1
        self._count(tokens, blocks, 1)
        return booking

    def lose(self, error: NodeLost) -> None:
        """Notify all reservations that the node is gone."""
        self.join(False)
        for booking in list(self.bookings):
            booking.lost(error)

    def opened(self) -> None:
        """Record that the node accepted the token stream."""
        self.open = self.linked = True
        self._doubt(False)
        self._changed()

    def pause(self, *, is_silent: bool = False) -> None:
        """Record that the token stream broke, or was silent for too long, and may resume."""
        self.open = False
        self._changed()
        self._doubt(self.suspected or is_silent, self.link_suspected)

    def deal(self, frame: StepFrame) -> None:
        """Handle a token-stream frame's content besides tokens, which `DeltaQueue` passes to the listeners."""
        if frame.pulse is not None:
            self._feel(frame.pulse)
        for failure in frame.failed:
            if listener := self.listeners.get(failure.request_id):
                listener.failed(failure)
        for each in frame.deviations:
            log.warning(
                "%s sent blocks of %s that differ from those of %s", each.sender[0], each.request_id, self.key[0]
            )
            self._corrupt(each.sender, self.key)

    def broken(self, error: KvferryError) -> None:
        """Give up everything on the node after its token stream ended."""
        self.open = self.linked = self.stalled = self.suspected = self.link_suspected = False
        self._changed()
        self._give_up(error)

    def _feel(self, pulse: Pulse) -> None:
        """Update `stalled`, and give up all requests if the engine hangs.

        A hanging link alone needs no action here: it fails its own transfers."""
        hangs = pulse.engine_s > max(STALL_S, STALL * pulse.usual_s)
        stalled = hangs or pulse.link_s > STALL_S
        if stalled != self.stalled:
            log.log(logging.WARNING if stalled else logging.INFO, "%s %s", self.key[0], pulse if stalled else "moves")
            self.stalled = stalled
            self._changed()
        if hangs:
            self._give_up(NodeLost(f"{self.key[0]}: a step has taken {pulse.engine_s:.1f} s"))
        self._doubt(pulse.engine_s > max(SUSPECT_S, SUSPECT * pulse.usual_s), pulse.link_s > SUSPECT_S)

    def _doubt(self, suspected: bool, link: bool = False) -> None:
        """Update what is suspected, and notify the attempts on the node when a suspicion begins."""
        began = (suspected and not self.suspected) or (link and not self.link_suspected)
        self.suspected, self.link_suspected = suspected, link
        if began:
            for booking in list(self.bookings):
                booking.suspected()

    def _give_up(self, error: KvferryError) -> None:
        """Notify everyone who waits for the node, and detach the listeners."""
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.lost(error)
        if isinstance(error, NodeLost):
            for booking in list(self.bookings):
                booking.lost(error)

    def _count(self, tokens: int, blocks: int, requests: int) -> None:
        self._book.add(tokens, blocks, requests)
        self._changed()

    def _figure(self) -> None:
        """Recompute the node's view and part before the next read of the summary."""
        lease, load = self.lease, self.lease.load
        queued = blocks_for(load.waiting_tokens, lease.block_size) if lease.role == "decode" else 0
        tokens, blocks, requests = self._book.counted(
            load.waiting_tokens, load.granted_blocks + queued, load.running_requests + load.waiting_requests
        )
        self._view = NodeView(lease, 0, tokens, requests, blocks, self._placed)
        before, self._part = self._part, self._part_now()
        self._room.change(self.key, self._view if self._grouped and self.reachable else None, before, self._part)

    def _changed(self) -> None:
        self.reachable = self.open and not self.stalled
        self._room.changed(self._figure)

    def _part_now(self) -> Part:
        if not self._grouped or self.lease.state != "ready":
            return Part()
        if self.lease.role == "prefill":
            return Part(prefills=1) if self.reachable else Part()
        spare = self.view.spare_blocks
        return Part(0, 1, max(0, spare), max(0, -spare), freed_per_s(self.view)) if self.reachable else Part()
