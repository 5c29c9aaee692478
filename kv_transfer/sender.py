"""The prefill side of ships: offers, posts blocks as they are computed, commits, and fails cleanly.

States: see sender_ship; the blocks' way: outgoing. One connection per decode address serves all ships and is made
again after a loss. A ship that fails after its grant completes the receives it will never fill by sending each a
single byte: UCX does not stop writing on a cancel, so the receiving side cancels nothing and knows its memory is quiet
when its receives have completed. So a ship that fails, or does not move, is given up alone; only an error of the
connection, or sends that do not end even then, close it under all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvferry.kv_transfer.dock import QUIESCE_TIMEOUT_S, Dock
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.outgoing import Outgoing
from kvferry.kv_transfer.ports import ShipEvents
from kvferry.kv_transfer.sender_ship import STALL_TIMEOUT_S, Ship, ShipState, ShipTimeouts, has_sent, lack, too_long
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol import errors
from kvferry.protocol.errors import GrantRefused, KvferryError, NodeLost, TransferFailed
from kvferry.protocol.link_messages import Abort, Asked, CommitAck, Grant, GrantRequest, Refusal
from kvferry.protocol.messages import DecodeTarget, TokenDelta
from kvferry.protocol.wire import pack


class Sender:
    """`offer`, `ship`, `commit` and `abort` may be called from any thread; everything else runs on the link thread, as
    an endpoint of a dock. events: who hears of offers that do not say who does; grant_timeout, stall_timeout: the
    patience of those that bring none."""

    takes = (Grant, Refusal, CommitAck)

    def __init__(
        self, dock: Dock, events: ShipEvents | None = None, *, grant_timeout: float = 30.0,
        stall_timeout: float = STALL_TIMEOUT_S,
    ):  # fmt: skip
        self._dock, self._events, self._patience = dock, events, ShipTimeouts(grant_timeout, stall_timeout)
        self._lock = threading.Lock()
        self._last_transfer = 0
        self.transfers: Transfers[Ship] = Transfers(dock.watch)
        dock.mount(self)

    # Any thread.

    def offer(
        self, target: DecodeTarget, asked: Asked, events: ShipEvents | None = None, peer: Peer = None,
        patience: ShipTimeouts | None = None,
    ) -> int:  # fmt: skip
        """Ask the decode node for a grant; returns the transfer id, under which events come: to `events`, if given.

        peer: the connection on which the node asked for them."""
        with self._lock:
            self._last_transfer = transfer = self._last_transfer + 1
            hears = events or self._events
            assert hears is not None
            self._dock.submit(lambda: self._offer(transfer, target, asked, hears, peer, patience or self._patience))
        return transfer

    def ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Post (prompt block index, block id) pairs after `granted`.

        The blocks hold their final content and stay held until `quiet`. Indices before the grant's first_block are
        skipped; a ship that failed ignores them."""
        self._dock.submit(lambda: self._ship(transfer, blocks))

    def commit(self, transfer: int, first: TokenDelta | None, covered: int = 0) -> None:
        """Every granted block was given to `ship`, or those that are `covered` (see Commit), behind `first`."""
        now = self._dock.clock()
        self._dock.submit(lambda: self._commit(transfer, first, covered, now))

    def abort(self, transfer: int, reason: str) -> None:
        """Give the ship up; it fails with TransferFailed unless it already ended."""
        self._dock.submit(lambda: self._abort(transfer, TransferFailed(f"aborted: {reason}")))

    # Link thread: orders of the engine.

    def _offer(
        self, transfer: int, target: DecodeTarget, asked: Asked, events: ShipEvents, asker: Peer, patience: ShipTimeouts
    ) -> None:
        peer, now = asker or self._dock.dial(target.link_address), self._dock.clock()
        ship = Ship(transfer, events, target.node_id, peer, now + patience.grant_s, self._dock.name, patience)
        self.transfers.add(ship)
        data = pack(GrantRequest(transfer, target.epoch, target.fingerprint, asked))
        heard = asker is None or self._dock.hears(asker)
        error = too_long(asked, len(data)) if heard else NodeLost("it is gone since it asked for blocks")
        ship.unanswered = error is None
        if error is not None:
            self._fail(ship, ship.blame(error), tell=False)
        else:
            self._dock.link.send(peer, ship.question.ask(data, now))

    def _ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        ship = self.transfers.find(transfer)
        if ship is None or not ship.live:
            return
        if ship.blocks is None or ship.state is ShipState.DRAINING:
            self._abort(transfer, TransferFailed(f"blocks were shipped while {ship.state}"))
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
        if missing := lack(ship, covered):
            self._abort(transfer, TransferFailed(missing))
            return
        ship.commit(first, covered, now)
        self._moved(ship)

    def _abort(self, transfer: int, error: KvferryError) -> None:
        if ship := self.transfers.find(transfer):
            self._fail(ship, error, tell=True)

    # Link thread: what comes from the dock.

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
        """Drop a connection's ships."""

    def fail(self, ship: Ship, error: KvferryError) -> None:
        self._fail(ship, ship.blame(error), tell=False)

    def closed(self, ship: Ship) -> None:
        ship.hear()
        if ship.blocks is not None:
            ship.blocks.closed()
        self._settle(ship)

    def overdue(self, ship: Ship) -> None:
        """Repeat unanswered messages and abandon ships that do not move.

        A ship that does not move is given up alone. Only sends that do not end even then cost all their connection."""
        if ship.repeats(self._dock.clock()):
            self._dock.link.send(ship.peer, ship.question.message)
        elif ship.state is ShipState.OFFERED:
            self._fail(ship, ship.blame(GrantRefused(f"no grant within {ship.patience.grant_s:g} s")), tell=True)
        elif ship.live:
            what = "the commit was not acknowledged" if ship.commit_sent else "no block was taken"
            self._fail(ship, ship.blame(TransferFailed(f"{what} for {ship.patience.stall_s:g} s")), tell=True)
        elif ship.in_flight:
            self._dock.drop(ship.peer, TransferFailed(f"sends did not end for {QUIESCE_TIMEOUT_S:g} s"))

    # Link thread: what decode answered.

    def _granted(self, ship: Ship, grant: Grant) -> None:
        if not ship.unanswered:
            return
        ship.hear()
        ship.blocks = Outgoing(
            self._dock.path, grant, ship.peer, lambda: self._moved(ship),
            lambda error: self._dock.drop(ship.peer, error),
        )  # fmt: skip
        if ship.state is ShipState.OFFERED:
            ship.move(ShipState.GRANTED)
            ship.progressed(self._dock.clock())
            ship.events.granted(ship.transfer, grant.first_block)
        else:
            self._dock.send(ship.peer, Abort(ship.transfer, "given up before the grant came"))
            ship.blocks.fill()
            self._settle(ship)

    def _refused(self, ship: Ship, refusal: Refusal) -> None:
        ship.hear()
        if ship.live:
            error = errors.from_body({"error": {"code": refusal.code, "message": refusal.message}})
            self._fail(ship, ship.blame(error), tell=False)
        else:
            self._settle(ship)

    def _acknowledged(self, ship: Ship) -> None:
        ship.move(ShipState.DONE)
        ship.question.answered()
        ship.progressed(self._dock.clock())
        ship.events.done(ship.transfer, ship.stats(self._dock.clock()))
        self._settle(ship)

    def _moved(self, ship: Ship) -> None:
        """The engine committed, or a send or a checksum ended."""
        ship.progressed(self._dock.clock())
        commit = ship.take_commit()
        if commit is not None:
            self._dock.link.send(ship.peer, ship.question.ask(pack(commit), self._dock.clock()))
        elif has_sent(ship):
            ship.events.sent(ship.transfer)
        self._settle(ship)

    # Link thread: ends.

    def _fail(self, ship: Ship, error: KvferryError, tell: bool) -> None:
        if not ship.live:
            return
        ship.move(ShipState.FAILED)
        ship.progressed(self._dock.clock())
        ship.question.answered()
        if tell:
            abort = pack(Abort(ship.transfer, error.message))
            self._dock.link.send(ship.peer, ship.question.ask(abort, self._dock.clock()))
        if ship.blocks is not None:
            ship.blocks.stop() if self._dock.is_closing(ship.peer) else ship.blocks.fill()
        ship.events.failed(ship.transfer, error)
        self._settle(ship)

    def _settle(self, ship: Ship) -> None:
        """Report quiet when no send is left; forget the ship when decode's answer came too."""
        if ship.state in (ShipState.DONE, ShipState.FAILED) and not ship.in_flight:
            ship.move(ShipState.QUIET)
            ship.events.quiet(ship.transfer)
        if ship.state is ShipState.QUIET and not ship.unanswered:
            self.transfers.remove(ship)
