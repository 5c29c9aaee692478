"""NodeEntry: one live node with its lease, this router's reservations, its stream listeners, and its health."""

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
from kvferry.router.nodes.capacity_summary import CapacitySummary, NodeCapacity
from kvferry.router.nodes.reservations import Reservations

log = logging.getLogger(__name__)

STALL_S, STALL = 2.0, 10.0
"""Duration of a step, in seconds and in multiples of the node's usual step; beyond both the node is stalled."""
SUSPECT_S, SUSPECT = 0.8, 5.0
"""Duration of a step, in seconds and in multiples of the node's usual step; beyond both the node is suspected.

Its link is suspected while one iteration of the link's thread takes longer than SUSPECT_S."""


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
        """Handle the beginning of the node's drain: the stream should move."""


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
        """Drop the amounts, which the lease counts from now on: the prompt is computed or the blocks are in use."""
        self._entry._count(-self.tokens, -self.blocks, 0)
        self.tokens = self.blocks = 0

    def release(self) -> None:
        """End the reservation; may be called repeatedly."""
        if self in self._entry.reservations:
            del self._entry.reservations[self]
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
    leased_at  monotonic seconds of the newest lease, from the registry or a relay
    corrupt    called for each corrupt transfer to this node, with sender and receiver
    """

    def __init__(
        self,
        lease: NodeLease,
        summary: CapacitySummary,
        corrupt: Callable[[NodeKey, NodeKey], None] = lambda sender, here: None,
    ) -> None:
        self.key = node_key(lease)
        self.lease = lease
        self.open = self.linked = self.stalled = self.suspected = self.link_suspected = self.reachable = False
        self.leased_at = 0.0
        self.reservations: dict[Reservation, None] = {}
        self.listeners: dict[str, Listener] = {}
        self._totals, self._summary, self._corrupt = Reservations(), summary, corrupt
        self._grouped, self._placed, self._capacity = False, 0, NodeCapacity()
        self._changed()

    @property
    def view(self) -> NodeView:
        """Return the node as placement sees it, after pending updates."""
        self._summary.update()
        return self._view

    @property
    def idle(self) -> bool:
        """Return whether the node has no reservation and no listener."""
        return not self.reservations and not self.listeners and self._totals.empty

    @property
    def drains(self) -> bool:
        """Return whether the node drains."""
        return self.lease.state == "draining"

    def renew(self, lease: NodeLease) -> None:
        """Update the lease after a read of the registry, and notify listeners when draining begins."""
        self._totals.next_poll()
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

    def reserve(
        self, tokens: int, blocks: int, lost: Callable[[NodeLost], None], suspected: Callable[[], None] = ignored
    ) -> Reservation:
        """Reserve capacity for an attempt; see Reservation."""
        reservation = Reservation(tokens, blocks, lost, suspected, self)
        self.reservations[reservation] = None
        self._summary.placed = self._placed = self._summary.placed + 1
        self._count(tokens, blocks, 1)
        return reservation

    def lose(self, error: NodeLost) -> None:
        """Notify all reservations that the node is lost."""
        self.join(False)
        for reservation in list(self.reservations):
            reservation.lost(error)

    def opened(self) -> None:
        """Record that the node accepted the token stream."""
        self.open = self.linked = True
        self._suspect(False)
        self._changed()

    def pause(self, *, is_silent: bool = False) -> None:
        """Record that the token stream broke, or was silent for too long, and may resume."""
        self.open = False
        self._changed()
        self._suspect(self.suspected or is_silent, self.link_suspected)

    def deal(self, frame: StepFrame) -> None:
        """Handle a token-stream frame's content besides tokens, which `DeltaQueue` passes to the listeners."""
        if frame.pulse is not None:
            self._check_pulse(frame.pulse)
        for failure in frame.failed:
            if listener := self.listeners.get(failure.request_id):
                listener.failed(failure)
        for each in frame.deviations:
            log.warning(
                "%s sent blocks of %s that differ from those of %s", each.sender[0], each.request_id, self.key[0]
            )
            self._corrupt(each.sender, self.key)

    def broken(self, error: KvferryError) -> None:
        """Fail all requests on the node after its token stream ended."""
        self.open = self.linked = self.stalled = self.suspected = self.link_suspected = False
        self._changed()
        self._give_up(error)

    def _check_pulse(self, pulse: Pulse) -> None:
        """Update `stalled`, and fail all requests on the node if the engine hangs.

        A hanging link alone needs no action here, since its transfers fail by themselves."""
        hangs = pulse.engine_s > max(STALL_S, STALL * pulse.usual_s)
        stalled = hangs or pulse.link_s > STALL_S
        if stalled != self.stalled:
            log.log(logging.WARNING if stalled else logging.INFO, "%s %s", self.key[0], pulse if stalled else "moves")
            self.stalled = stalled
            self._changed()
        if hangs:
            self._give_up(NodeLost(f"{self.key[0]}: a step has taken {pulse.engine_s:.1f} s"))
        self._suspect(pulse.engine_s > max(SUSPECT_S, SUSPECT * pulse.usual_s), pulse.link_s > SUSPECT_S)

    def _suspect(self, suspected: bool, link: bool = False) -> None:
        """Update the suspicions, and notify the attempts on the node when one begins."""
        began = (suspected and not self.suspected) or (link and not self.link_suspected)
        self.suspected, self.link_suspected = suspected, link
        if began:
            for reservation in list(self.reservations):
                reservation.suspected()

    def _give_up(self, error: KvferryError) -> None:
        """Notify all listeners and reservations of the node, and detach the listeners."""
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.lost(error)
        if isinstance(error, NodeLost):
            for reservation in list(self.reservations):
                reservation.lost(error)

    def _count(self, tokens: int, blocks: int, requests: int) -> None:
        self._totals.add(tokens, blocks, requests)
        self._changed()

    def _update(self) -> None:
        """Recompute the node's view and capacity, before the next read of the summary."""
        lease, load = self.lease, self.lease.load
        queued = blocks_for(load.waiting_tokens, lease.block_size) if lease.role == "decode" else 0
        tokens, blocks, requests = self._totals.counted(
            load.waiting_tokens, load.granted_blocks + queued, load.running_requests + load.waiting_requests
        )
        self._view = NodeView(lease, 0, tokens, requests, blocks, self._placed)
        before, self._capacity = self._capacity, self._current_capacity()
        self._summary.change(self.key, self._view if self._grouped and self.reachable else None, before, self._capacity)

    def _changed(self) -> None:
        self.reachable = self.open and not self.stalled
        self._summary.schedule(self._update)

    def _current_capacity(self) -> NodeCapacity:
        if not self._grouped or not self.reachable or self.lease.state != "ready":
            return NodeCapacity()
        if self.lease.role == "prefill":
            return NodeCapacity(prefills=1)
        spare = self.view.spare_blocks
        return NodeCapacity(0, 1, max(0, spare), max(0, -spare), freed_per_s(self.view))
