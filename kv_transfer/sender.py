"""Sending side of a ship (transfer of KV blocks, on any node): offers, sends and commits blocks, and handles failures.

States: see sender_ship. Block sends: see outgoing. One connection per receiving address carries all ships; it is made
again after a loss. UCX may continue to write after a cancelled receive, so the receiver cancels nothing. Its memory is
quiet (not written any more) when all its receives have completed. So a ship that fails after its grant sends a single
byte to each receive that it will not fill. The failure or stall of one ship does not affect other ships. The connection
is closed, with all ships on it, only after an error of the connection or if the failed ship's sends do not end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvferry.kv_transfer.dock import QUIESCE_TIMEOUT_S, Dock
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.outgoing import Outgoing
from kvferry.kv_transfer.ports import ShipEvents
from kvferry.kv_transfer.sender_ship import (
    STALL_TIMEOUT_S,
    Ship,
    ShipState,
    ShipTimeouts,
    commit_obstacle,
    has_sent,
    too_long,
)
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol import errors
from kvferry.protocol.errors import GrantRefused, KvferryError, NodeLost, TransferFailed
from kvferry.protocol.link_messages import Abort, CommitAck, Grant, GrantPurpose, GrantRequest, Refusal
from kvferry.protocol.messages import DecodeTarget, TokenDelta
from kvferry.protocol.wire import pack


class Sender:
    """Sending side of ships on a dock. Implements kv_transfer.dock.Endpoint.

    `offer`, `ship`, `commit` and `abort` may be called from any thread; everything else runs on the link thread.

    events                        receives the events of offers made without `events`
    grant_timeout, stall_timeout  seconds, for offers made without `timeouts` (see ShipTimeouts)
    """

    takes = (Grant, Refusal, CommitAck)

    def __init__(
        self, dock: Dock, events: ShipEvents | None = None, *, grant_timeout: float = 30.0,
        stall_timeout: float = STALL_TIMEOUT_S,
    ):  # fmt: skip
        self._dock, self._events, self._timeouts = dock, events, ShipTimeouts(grant_timeout, stall_timeout)
        self._lock = threading.Lock()
        self._last_transfer = 0
        self.transfers: Transfers[Ship] = Transfers(dock.watch)
        dock.mount(self)

    # Called from any thread.

    def offer(
        self, target: DecodeTarget, purpose: GrantPurpose, events: ShipEvents | None = None, peer: Peer = None,
        timeouts: ShipTimeouts | None = None,
    ) -> int:  # fmt: skip
        """Ask the target node for a grant; return the transfer id.

        events: receives the events of this ship. peer: the connection on which the node asked for the blocks, if it
        did."""
        with self._lock:
            self._last_transfer = transfer = self._last_transfer + 1
            receiver = events or self._events
            assert receiver is not None
            self._dock.submit(
                lambda: self._offer(transfer, target, purpose, receiver, peer, timeouts or self._timeouts)
            )
        return transfer

    def ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Post (prompt block index, block id) pairs after `granted`.

        The blocks have their final content and stay held until `quiet`. Indices before the grant's first_block are
        skipped. A failed ship ignores the call."""
        self._dock.submit(lambda: self._ship(transfer, blocks))

    def commit(self, transfer: int, first: TokenDelta | None, covered: int = 0) -> None:
        """Commit the ship after all its blocks, or those of the `covered` tokens (see Commit), were given to `ship`.

        first: the first generated token, if any."""
        now = self._dock.clock()
        self._dock.submit(lambda: self._commit(transfer, first, covered, now))

    def abort(self, transfer: int, reason: str) -> None:
        """Abort the ship: it fails with TransferFailed unless it has already ended."""
        self._dock.submit(lambda: self._abort(transfer, TransferFailed(f"aborted: {reason}")))

    # Link thread: calls of the engine.

    def _offer(
        self,
        transfer: int,
        target: DecodeTarget,
        purpose: GrantPurpose,
        events: ShipEvents,
        source: Peer,
        timeouts: ShipTimeouts,
    ) -> None:
        peer, now = source or self._dock.dial(target.link_address), self._dock.clock()
        ship = Ship(transfer, events, target.node_id, peer, now + timeouts.grant_s, self._dock.name, timeouts)
        self.transfers.add(ship)
        data = pack(GrantRequest(transfer, target.epoch, target.fingerprint, purpose))
        established = source is None or self._dock.is_established(source)
        error = too_long(purpose, len(data)) if established else NodeLost("the node disconnected after its request")
        ship.unanswered = error is None
        if error is not None:
            self._fail(ship, ship.attribute(error), notify=False)
        else:
            self._dock.link.send(peer, ship.pending.sent(data, now))

    def _ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        ship = self.transfers.find(transfer)
        if ship is None or not ship.live:
            return
        if ship.blocks is None or ship.state is ShipState.DRAINING:
            self._abort(transfer, TransferFailed(f"blocks were sent while {ship.state}"))
            return
        try:
            ship.blocks.post(blocks)
        except TransferFailed as error:
            self._abort(transfer, error)
            return
        if ship.blocks.posted and ship.state is ShipState.GRANTED:
            ship.move(ShipState.RUNNING)
        ship.progressed(self._dock.clock())

    def _commit(self, transfer: int, first: TokenDelta | None, covered: int, now: float) -> None:
        ship = self.transfers.find(transfer)
        if ship is None or not ship.live or ship.state is ShipState.DRAINING:
            return
        if missing := commit_obstacle(ship, covered):
            self._abort(transfer, TransferFailed(missing))
            return
        ship.commit(first, covered, now)
        self._moved(ship)

    def _abort(self, transfer: int, error: KvferryError) -> None:
        if ship := self.transfers.find(transfer):
            self._fail(ship, error, notify=True)

    # Link thread: calls of the dock.

    def take(self, peer: Peer, message: Any) -> None:
        ship = self.transfers.find(message.transfer)
        if ship is None or ship.peer != peer:
            return
        if isinstance(message, Grant):
            self._granted(ship, message)
        elif isinstance(message, Refusal):
            self._refused(ship, message)
        elif ship.state is ShipState.DRAINING:
            self._acknowledged(ship)

    def forget(self, peer: Peer) -> None:
        """Do nothing: the ships of the connection end by `fail`."""

    def fail(self, ship: Ship, error: KvferryError) -> None:
        self._fail(ship, ship.attribute(error), notify=False)

    def closed(self, ship: Ship) -> None:
        ship.offer_answered()
        if ship.blocks is not None:
            ship.blocks.closed()
        self._settle(ship)

    def overdue(self, ship: Ship) -> None:
        """Repeat an unanswered message, fail a ship that stalls, or close a connection whose sends do not end."""
        if ship.repeats(self._dock.clock()):
            self._dock.link.send(ship.peer, ship.pending.message)
        elif ship.state is ShipState.OFFERED:
            self._fail(ship, ship.attribute(GrantRefused(f"no grant within {ship.timeouts.grant_s:g} s")), notify=True)
        elif ship.live:
            what = "the commit was not acknowledged" if ship.commit_sent else "no block was accepted"
            self._fail(ship, ship.attribute(TransferFailed(f"{what} for {ship.timeouts.stall_s:g} s")), notify=True)
        elif ship.in_flight:
            self._dock.drop(ship.peer, TransferFailed(f"sends did not end within {QUIESCE_TIMEOUT_S:g} s"))

    # Link thread: answers of the receiver.

    def _granted(self, ship: Ship, grant: Grant) -> None:
        if not ship.unanswered:
            return
        ship.offer_answered()
        ship.blocks = Outgoing(
            self._dock.path, grant, ship.peer, lambda: self._moved(ship),
            lambda error: self._dock.drop(ship.peer, error),
        )  # fmt: skip
        if ship.state is ShipState.OFFERED:
            ship.move(ShipState.GRANTED)
            ship.progressed(self._dock.clock())
            ship.events.granted(ship.transfer, grant.first_block)
        else:
            self._dock.send(ship.peer, Abort(ship.transfer, "aborted before the grant arrived"))
            ship.blocks.fill()
            self._settle(ship)

    def _refused(self, ship: Ship, refusal: Refusal) -> None:
        ship.offer_answered()
        if ship.live:
            error = errors.from_body({"error": {"code": refusal.code, "message": refusal.message}})
            self._fail(ship, ship.attribute(error), notify=False)
        else:
            self._settle(ship)

    def _acknowledged(self, ship: Ship) -> None:
        ship.move(ShipState.DONE)
        ship.pending.answered()
        ship.progressed(self._dock.clock())
        ship.events.done(ship.transfer, ship.stats(self._dock.clock()))
        self._settle(ship)

    def _moved(self, ship: Ship) -> None:
        """Advance the ship after the engine's commit, or the end of a send or checksum."""
        ship.progressed(self._dock.clock())
        commit = ship.take_commit()
        if commit is not None:
            self._dock.link.send(ship.peer, ship.pending.sent(pack(commit), self._dock.clock()))
        elif has_sent(ship):
            ship.events.sent(ship.transfer)
        self._settle(ship)

    # Link thread: the end of a ship.

    def _fail(self, ship: Ship, error: KvferryError, notify: bool) -> None:
        if not ship.live:
            return
        ship.move(ShipState.FAILED)
        ship.progressed(self._dock.clock())
        ship.pending.answered()
        if notify:
            abort = pack(Abort(ship.transfer, error.message))
            self._dock.link.send(ship.peer, ship.pending.sent(abort, self._dock.clock()))
        if ship.blocks is not None:
            ship.blocks.stop() if self._dock.is_closing(ship.peer) else ship.blocks.fill()
        ship.events.failed(ship.transfer, error)
        self._settle(ship)

    def _settle(self, ship: Ship) -> None:
        """Call `quiet` when no send is left; remove the ship once the receiver has answered, too."""
        if ship.state in (ShipState.DONE, ShipState.FAILED) and not ship.in_flight:
            ship.move(ShipState.QUIET)
            ship.events.quiet(ship.transfer)
        if ship.state is ShipState.QUIET and not ship.unanswered:
            self.transfers.remove(ship)
