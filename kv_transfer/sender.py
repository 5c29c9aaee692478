"""The prefill side of ships: offers, posts blocks as they are computed, commits, and fails cleanly.

States: see kv_transfer.states. One connection per decode address serves all ships and is made again after a loss. A
ship that fails after its grant completes the receives it will never fill by sending each a single byte: UCX does not
stop writing on a cancel, so the receiving side cancels nothing and knows its memory is quiet when its receives have
completed. Where that may not happen (an error, an unanswered commit, sends that do not end) the whole connection is
closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.checksum import UNVERIFIED, Checksums, ThreadedChecksums, is_sampled
from kv_transfer.control import read
from kv_transfer.link import MAX_MESSAGE_BYTES, Link, Peer
from kv_transfer.peers import Peers
from kv_transfer.ports import BlockMemory, ShipEvents, ShipStats
from kv_transfer.ship import Ship
from kv_transfer.states import ShipState, moved
from kv_transfer.tags import block_tag
from protocol import errors
from protocol.errors import GrantRefused, InvalidRequest, KvferryError, TransferFailed
from protocol.messages import Abort, Commit, CommitAck, DecodeTarget, Grant, GrantRequest, Job, Refusal, TokenDelta
from protocol.wire import WireError, pack

log = logging.getLogger(__name__)
FILLER = b"\0"
SWEEP_S = 0.25
QUIESCE_TIMEOUT_S = 10.0
FROM_DECODE = Grant | Refusal | CommitAck
LIVE = (ShipState.OFFERED, ShipState.GRANTED, ShipState.RUNNING, ShipState.DRAINING)


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
        self._link, self._memory, self._events = link, memory, events
        self._verify, self._grant_timeout, self._ack_timeout = verify, grant_timeout, ack_timeout
        self._checksums = checksums or ThreadedChecksums(link.submit)
        self._clock = clock
        self._lock = threading.Lock()
        self._last_transfer = 0
        self._ships: dict[int, Ship] = {}
        self._connections: dict[str, Peer] = {}
        self._peers: Peers[Ship] = Peers(link)
        self._sweeping = False

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
        peer = self._connection(target.link_address)
        ship = Ship(transfer, job, peer, self._clock() + self._grant_timeout)
        self._ships[transfer] = ship
        self._peers.add(peer, transfer, ship)
        self._watch()
        data = pack(GrantRequest(transfer, target.epoch, target.fingerprint, job))
        if len(data) > MAX_MESSAGE_BYTES:
            ship.unanswered = False
            limit = f"a prompt of {len(job.token_ids)} tokens does not fit a grant request of {MAX_MESSAGE_BYTES} bytes"
            self._fail(ship, InvalidRequest(limit, param="prompt"), tell=False)
        else:
            self._link.send(peer, data)

    def _connection(self, address: str) -> Peer:
        if address not in self._connections:
            self._connections[address] = self._link.connect(address)
        return self._connections[address]

    def _ship(self, transfer: int, blocks: Sequence[tuple[int, int]]) -> None:
        ship = self._ships.get(transfer)
        if ship is None or ship.state not in LIVE:
            return
        if ship.grant is None or ship.state is ShipState.DRAINING:
            self._abort(transfer, TransferFailed(f"blocks were shipped while {ship.state}"))
            return
        grant = ship.grant
        for index, block_id in blocks:
            if index < grant.first_block:
                continue
            if index >= grant.first_block + grant.block_count or index in ship.crcs:
                self._abort(transfer, TransferFailed(f"prompt block {index} was not granted, or was shipped before"))
                return
            self._post(ship, grant, index, self._memory.block(block_id))

    def _post(self, ship: Ship, grant: Grant, index: int, buffer: Any) -> None:
        if ship.state is ShipState.GRANTED:
            ship.state = moved(ship.state, ShipState.RUNNING)
            ship.posted_at = self._clock()
        ship.in_flight += 1
        ship.bytes += buffer.nbytes
        ship.crcs[index] = UNVERIFIED
        tag = block_tag(grant.nonce, ship.transfer, index)
        self._link.send_block(ship.peer, tag, buffer, lambda error: self._sent(ship, error))
        if is_sampled(ship.transfer, index, self._verify):
            ship.summing += 1
            self._checksums.take(buffer, lambda crc: self._summed(ship, index, crc))

    def _commit(self, transfer: int, first: TokenDelta, now: float) -> None:
        ship = self._ships.get(transfer)
        if ship is None or ship.state not in LIVE or ship.first is not None:
            return
        if ship.grant is None or len(ship.crcs) != ship.grant.block_count:
            granted = ship.grant.block_count if ship.grant else 0
            self._abort(transfer, TransferFailed(f"commit after {len(ship.crcs)} of {granted} blocks"))
            return
        ship.first, ship.committed_at = first, now
        ship.state = moved(ship.state, ShipState.DRAINING)
        ship.deadline = self._clock() + self._ack_timeout
        self._send_commit(ship)

    def _summed(self, ship: Ship, index: int, crc: int) -> None:
        ship.crcs[index] = crc
        ship.summing -= 1
        self._send_commit(ship)

    def _send_commit(self, ship: Ship) -> None:
        """Once the commit was called for and every checksum is taken."""
        if ship.state is not ShipState.DRAINING or ship.first is None or ship.summing:
            return
        checksums = tuple(crc for _, crc in sorted(ship.crcs.items())) if self._verify > 0 else ()
        self._link.send(ship.peer, pack(Commit(ship.transfer, len(ship.crcs), checksums, ship.first)))

    def _abort(self, transfer: int, error: KvferryError) -> None:
        ship = self._ships.get(transfer)
        if ship is not None:
            self._fail(ship, error, tell=True)

    # Link thread: what comes from the link.

    def message(self, peer: Peer, data: bytes) -> None:
        if self._peers.is_closing(peer):
            return
        try:
            message = read(data, FROM_DECODE)
        except WireError as error:
            self._drop(peer, error)
            return
        ship = self._ships.get(message.transfer)
        if ship is None or ship.peer != peer:
            return
        if isinstance(message, Grant):
            self._granted(ship, message)
        elif isinstance(message, Refusal):
            self._refused(ship, message)
        elif ship.state is ShipState.DRAINING:
            self._acknowledged(ship)

    def _granted(self, ship: Ship, grant: Grant) -> None:
        if not ship.unanswered:
            return
        ship.unanswered, ship.grant = False, grant
        if ship.state is ShipState.OFFERED:
            ship.state = moved(ship.state, ShipState.GRANTED)
            ship.deadline = float("inf")
            self._events.granted(ship.transfer, grant.first_block)
        else:
            self._link.send(ship.peer, pack(Abort(ship.transfer, "given up before the grant came")))
            self._fill(ship)
            self._settle(ship)

    def _refused(self, ship: Ship, refusal: Refusal) -> None:
        ship.unanswered = False
        if ship.state in LIVE:
            error = errors.from_body({"error": {"code": refusal.code, "message": refusal.message}})
            self._fail(ship, error, tell=False)
        else:
            self._settle(ship)

    def _acknowledged(self, ship: Ship) -> None:
        ship.state = moved(ship.state, ShipState.DONE)
        ship.deadline = self._clock() + QUIESCE_TIMEOUT_S
        now = self._clock()
        began = ship.committed_at if ship.posted_at is None else min(ship.posted_at, ship.committed_at)
        stats = ShipStats(len(ship.crcs), ship.bytes, now - began, now - ship.committed_at)
        self._events.done(ship.transfer, stats)
        self._settle(ship)

    def _sent(self, ship: Ship, error: Exception | None) -> None:
        if error is None:
            ship.in_flight -= 1
            self._settle(ship)
        else:
            self._drop(ship.peer, error)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self._drop(peer, error)

    # Link thread: ends.

    def _fail(self, ship: Ship, error: KvferryError, tell: bool) -> None:
        if ship.state not in LIVE:
            return
        ship.state = moved(ship.state, ShipState.FAILED)
        ship.deadline = self._clock() + QUIESCE_TIMEOUT_S
        if tell:
            self._link.send(ship.peer, pack(Abort(ship.transfer, error.message)))
        if not self._peers.is_closing(ship.peer):
            self._fill(ship)
        self._events.failed(ship.transfer, error)
        self._settle(ship)

    def _fill(self, ship: Ship) -> None:
        """Complete the granted receives that no block was posted for."""
        if ship.grant is None:
            return
        first, count = ship.grant.first_block, ship.grant.block_count
        for index in range(first, first + count):
            if index not in ship.crcs:
                tag = block_tag(ship.grant.nonce, ship.transfer, index)
                self._link.send_block(ship.peer, tag, FILLER, lambda error: None)

    def _settle(self, ship: Ship) -> None:
        """Report quiet when no send is left; forget the ship when decode's answer came too."""
        if ship.state in (ShipState.DONE, ShipState.FAILED) and not ship.in_flight:
            ship.state = moved(ship.state, ShipState.QUIET)
            self._events.quiet(ship.transfer)
        if ship.state is ShipState.QUIET and not ship.unanswered:
            self._ships.pop(ship.transfer, None)
            self._peers.remove(ship.peer, ship.transfer)

    def _drop(self, peer: Peer, error: Exception) -> None:
        """Close the connection; every ship on it fails now and is quiet when the link says so."""
        known = error if isinstance(error, KvferryError) else TransferFailed(f"{peer}: {error}")
        for address in [a for a, p in self._connections.items() if p == peer]:
            del self._connections[address]

        def quiet(ship: Ship) -> None:
            ship.in_flight, ship.unanswered = 0, False
            self._settle(ship)

        self._peers.drop(peer, lambda ship: self._fail(ship, known, tell=False), quiet)

    def _watch(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._link.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End what waited too long. A silent decode is asked no further: closing the connection frees both sides."""
        now = self._clock()
        for ship in [s for s in self._ships.values() if s.deadline < now]:
            if ship.state is ShipState.OFFERED:
                self._fail(ship, GrantRefused(f"no grant within {self._grant_timeout:g} s"), tell=True)
            elif ship.state is ShipState.DRAINING:
                self._drop(ship.peer, TransferFailed(f"commit not acknowledged within {self._ack_timeout:g} s"))
            elif ship.in_flight:
                self._drop(ship.peer, TransferFailed(f"sends did not end within {QUIESCE_TIMEOUT_S:g} s"))
        self._sweeping = False
        if self._ships:
            self._watch()
