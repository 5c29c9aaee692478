"""The prefill side of ships: offers, posts blocks as they are computed, commits, and fails cleanly.

States: see sender_ship; the blocks' way: outgoing. One connection per decode address serves all ships and is made
again after a loss. A ship that fails after its grant completes the receives it will never fill by sending each a
single byte: UCX does not stop writing on a cancel, so the receiving side cancels nothing and knows its memory is quiet
when its receives have completed. Where that may not happen (an error, an unanswered commit, sends that do not end) the
whole connection is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer.block_path import BlockPath
from kv_transfer.checksum import Checksums, ThreadedChecksums
from kv_transfer.dialled import Dialled
from kv_transfer.link import MAX_MESSAGE_BYTES, Link, Peer
from kv_transfer.outgoing import Outgoing
from kv_transfer.ports import BlockMemory, ShipEvents
from kv_transfer.sender_ship import Ship, ShipState
from kv_transfer.transfers import QUIESCE_TIMEOUT_S, Transfers
from protocol import errors
from protocol.errors import GrantRefused, InvalidRequest, KvferryError, TransferFailed
from protocol.link_messages import Abort, CommitAck, Grant, GrantRequest, Refusal
from protocol.messages import DecodeTarget, Job, TokenDelta
from protocol.wire import pack

FROM_DECODE = Grant | Refusal | CommitAck


class Sender:
    """`offer`, `ship`, `commit` and `abort` may be called from any thread; everything else runs on the link thread.

    verify         share of blocks, 0 to 1, that get a checksum
    grant_timeout  seconds an offer waits for its grant; ack_timeout: a commit for its acknowledgement
    checksums      by default on a thread of their own; clock: monotonic seconds
    """

    def __init__(
        self,
        link: Link,
        memory: BlockMemory,
        events: ShipEvents,
        *,
        verify: float = 1.0,
        grant_timeout: float = 30.0,
        ack_timeout: float = 30.0,
        checksums: Checksums | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._link, self._events, self._clock = link, events, clock
        self._grant_timeout, self._ack_timeout = grant_timeout, ack_timeout
        self._path = BlockPath(link, memory, checksums or ThreadedChecksums(link.submit), verify)
        self._lock = threading.Lock()
        self._last_transfer = 0
        self._dialled = Dialled(link)
        self._ships: Transfers[Ship] = Transfers(
            link,
            clock,
            forget=self._dialled.forget,
            fail=lambda ship, error: self._fail(ship, error, tell=False),
            quiet=self._closed,
            overdue=self._overdue,
        )

    # Any thread.

    def offer(self, target: DecodeTarget, job: Job) -> int:
        """Ask the decode node for a grant; returns the transfer id, under which events come."""
        with self._lock:
            self._last_transfer += 1
            transfer = self._last_transfer
            self._link.submit(lambda: self._offer(transfer, target, job))
        return transfer

    def ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Post (prompt block index, block id) pairs after `granted`. The blocks hold their final content and stay held
        until `quiet`. Indices before the grant's first_block are skipped; a ship that failed ignores them."""
        self._link.submit(lambda: self._ship(transfer, blocks))

    def commit(self, transfer: int, first: TokenDelta) -> None:
        """Every granted block was given to `ship`; `first` is the first token's delta."""
        now = self._clock()
        self._link.submit(lambda: self._commit(transfer, first, now))

    def abort(self, transfer: int, reason: str) -> None:
        """Give the ship up; it fails with TransferFailed unless it already ended."""
        self._link.submit(lambda: self._abort(transfer, TransferFailed(f"aborted: {reason}")))

    # Link thread: orders of the engine.

    def _offer(self, transfer: int, target: DecodeTarget, job: Job) -> None:
        peer = self._dialled.peer(target.link_address)
        ship = Ship(transfer, job, peer, self._clock() + self._grant_timeout)
        self._ships.add(ship)
        data = pack(GrantRequest(transfer, target.epoch, target.fingerprint, job))
        if len(data) > MAX_MESSAGE_BYTES:
            ship.unanswered = False
            limit = f"a prompt of {len(job.token_ids)} tokens does not fit a grant request of {MAX_MESSAGE_BYTES} bytes"
            self._fail(ship, InvalidRequest(limit, param="prompt"), tell=False)
        else:
            self._link.send(peer, data)

    def _ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        ship = self._ships.find(transfer)
        if ship is None or not ship.live:
            return
        if ship.blocks is None or ship.state is ShipState.DRAINING:
            self._abort(transfer, TransferFailed(f"blocks were shipped while {ship.state}"))
            return
        now = self._clock()
        try:
            ship.blocks.post(blocks)
        except TransferFailed as error:
            self._abort(transfer, error)
            return
        if ship.blocks.posted and ship.state is ShipState.GRANTED:
            ship.move(ShipState.RUNNING)
            ship.posted_at = now

    def _commit(self, transfer: int, first: TokenDelta, now: float) -> None:
        ship = self._ships.find(transfer)
        if ship is None or not ship.live or ship.first is not None:
            return
        if ship.blocks is None or not ship.blocks.complete:
            posted, count = (ship.blocks.posted, ship.blocks.count) if ship.blocks else (0, 0)
            self._abort(transfer, TransferFailed(f"commit after {posted} of {count} blocks"))
            return
        ship.first, ship.committed_at = first, now
        ship.move(ShipState.DRAINING)
        ship.deadline = self._clock() + self._ack_timeout
        self._moved(ship)

    def _abort(self, transfer: int, error: KvferryError) -> None:
        ship = self._ships.find(transfer)
        if ship is not None:
            self._fail(ship, error, tell=True)

    # Link thread: what comes from the link.

    def message(self, peer: Peer, data: bytes) -> None:
        message = self._ships.read(peer, data, FROM_DECODE)
        ship = None if message is None else self._ships.find(message.transfer)
        if ship is None or ship.peer != peer:
            return
        if isinstance(message, Grant):
            self._granted(ship, message)
        elif isinstance(message, Refusal):
            self._refused(ship, message)
        elif ship.state is ShipState.DRAINING:
            self._acknowledged(ship)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self._ships.drop(peer, error)

    def _granted(self, ship: Ship, grant: Grant) -> None:
        if not ship.unanswered:
            return
        ship.unanswered = False
        ship.blocks = Outgoing(
            self._path, grant, ship.peer, lambda: self._moved(ship), lambda error: self._ships.drop(ship.peer, error)
        )
        if ship.state is ShipState.OFFERED:
            ship.move(ShipState.GRANTED)
            ship.deadline = float("inf")
            self._events.granted(ship.transfer, grant.first_block)
        else:
            self._link.send(ship.peer, pack(Abort(ship.transfer, "given up before the grant came")))
            ship.blocks.fill()
            self._settle(ship)

    def _refused(self, ship: Ship, refusal: Refusal) -> None:
        ship.unanswered = False
        if ship.live:
            error = errors.from_body({"error": {"code": refusal.code, "message": refusal.message}})
            self._fail(ship, error, tell=False)
        else:
            self._settle(ship)

    def _acknowledged(self, ship: Ship) -> None:
        ship.move(ShipState.DONE)
        now = self._clock()
        ship.deadline = now + QUIESCE_TIMEOUT_S
        self._events.done(ship.transfer, ship.stats(now))
        self._settle(ship)

    def _moved(self, ship: Ship) -> None:
        """The engine committed, or a send or a checksum ended."""
        commit = ship.take_commit()
        if commit is not None:
            self._link.send(ship.peer, pack(commit))
        self._settle(ship)

    # Link thread: ends.

    def _fail(self, ship: Ship, error: KvferryError, tell: bool) -> None:
        if not ship.live:
            return
        ship.move(ShipState.FAILED)
        ship.deadline = self._clock() + QUIESCE_TIMEOUT_S
        if tell:
            self._link.send(ship.peer, pack(Abort(ship.transfer, error.message)))
        if ship.blocks is not None and not self._ships.is_closing(ship.peer):
            ship.blocks.fill()
        self._events.failed(ship.transfer, error)
        self._settle(ship)

    def _settle(self, ship: Ship) -> None:
        """Report quiet when no send is left; forget the ship when decode's answer came too."""
        if ship.state in (ShipState.DONE, ShipState.FAILED) and not ship.in_flight:
            ship.move(ShipState.QUIET)
            self._events.quiet(ship.transfer)
        if ship.state is ShipState.QUIET and not ship.unanswered:
            self._ships.remove(ship)

    def _closed(self, ship: Ship) -> None:
        ship.unanswered = False
        if ship.blocks is not None:
            ship.blocks.in_flight = 0
        self._settle(ship)

    def _overdue(self, ship: Ship) -> None:
        """A silent decode is asked no further: closing the connection frees both sides."""
        if ship.state is ShipState.OFFERED:
            self._fail(ship, GrantRefused(f"no grant within {self._grant_timeout:g} s"), tell=True)
        elif ship.state is ShipState.DRAINING:
            self._ships.drop(ship.peer, TransferFailed(f"commit not acknowledged within {self._ack_timeout:g} s"))
        elif ship.in_flight:
            self._ships.drop(ship.peer, TransferFailed(f"sends did not end within {QUIESCE_TIMEOUT_S:g} s"))
