"""The decode side of ships: asks the engine for blocks, posts receives into them, verifies, hands over.

States: see kv_transfer.states. A grant that fails is quiet when all its receives completed: those that the sender will
not fill it completes with a single byte each (see sender). Nothing is cancelled, because UCX goes on writing after a
cancel. Where the sender may not do so in time, the whole connection is closed, which makes every receive on it quiet.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence

from kv_transfer.checksum import UNVERIFIED, Checksums, ThreadedChecksums, is_sampled
from kv_transfer.control import read
from kv_transfer.link import Link, Peer
from kv_transfer.peers import Peers
from kv_transfer.ports import BlockMemory, GrantEvents, TransferKey
from kv_transfer.reservation import Connection, Reservation
from kv_transfer.states import GrantState, moved
from kv_transfer.tags import MAX_BLOCKS, MAX_NONCE, block_tag
from protocol.errors import Cancelled, DeadlineExceeded, Incompatible, KvferryError, NodeLost, TransferFailed
from protocol.messages import Abort, Commit, CommitAck, Grant, GrantRequest, Refusal
from protocol.wire import WireError, pack

log = logging.getLogger(__name__)
SWEEP_S = 0.25
QUIESCE_TIMEOUT_S = 10.0
FROM_PREFILL = GrantRequest | Commit | Abort
LIVE = (GrantState.NEW, GrantState.GRANTED, GrantState.RECEIVING, GrantState.LANDED)


class Receiver:
    """`granted`, `refused` and `cancel` may be called from any thread; everything else runs on the link thread.

    epoch        of this process: requests for an earlier one are refused with node_lost
    fingerprint  others are refused with incompatible
    verify       share of blocks, 0 to 1, whose checksum is compared where the sender took one
    """

    def __init__(
        self,
        link: Link,
        memory: BlockMemory,
        events: GrantEvents,
        epoch: int,
        fingerprint: str,
        verify: float = 1.0,
        *,
        checksums: Checksums | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._link, self._memory, self._events = link, memory, events
        self._epoch, self._fingerprint, self._verify = epoch, fingerprint, verify
        self._checksums = checksums or ThreadedChecksums(link.submit)
        self._clock = clock
        self._nonces = itertools.count(random.randrange(MAX_NONCE))
        self._connections: dict[Peer, Connection] = {}
        self._reservations: dict[TransferKey, Reservation] = {}
        self._peers: Peers[Reservation] = Peers(link)
        self._sweeping = False

    # Any thread.

    def granted(self, key: TransferKey, first_block: int, block_ids: Sequence[int]) -> None:
        """The engine reserved block_ids for prompt blocks first_block, first_block + 1, …; earlier ones it holds."""
        self._link.submit(lambda: self._granted(key, first_block, block_ids))

    def refused(self, key: TransferKey, error: KvferryError) -> None:
        """The engine cannot reserve."""
        self._link.submit(lambda: self._refused(key, error))

    def cancel(self, key: TransferKey, error: KvferryError) -> None:
        """Give the grant up: `failed` with this error comes, then `quiet`; nothing if it ended already."""
        self._link.submit(lambda: self._cancel(key, error))

    # Link thread: answers of the engine.

    def _granted(self, key: TransferKey, first_block: int, block_ids: Sequence[int]) -> None:
        held = self._reservations.get(key)
        assert held is not None, f"{key} was answered twice"
        held.unanswered = False
        if held.state is not GrantState.NEW:
            self._settle(held)
            return
        if first_block + len(block_ids) > MAX_BLOCKS:
            self._fail(held, TransferFailed(f"a ship addresses at most {MAX_BLOCKS} blocks"), tell=True)
            return
        self._post(held, first_block, block_ids)

    def _post(self, held: Reservation, first_block: int, block_ids: Sequence[int]) -> None:
        """Post the receives, then tell the sender: no block ever arrives unexpected."""
        held.state = moved(held.state, GrantState.GRANTED)
        held.first_block, held.count, held.in_flight = first_block, len(block_ids), len(block_ids)
        held.deadline = self._clock() + held.job.deadline_s
        nonce = self._connections[held.peer].nonce
        for index, block_id in enumerate(block_ids, first_block):
            held.buffers[index] = buffer = self._memory.block(block_id)
            tag = block_tag(nonce, held.transfer, index)
            done = self._landing(held, index)
            self._link.receive_block(held.peer, tag, buffer, done)
        self._link.send(held.peer, pack(Grant(held.transfer, first_block, held.count, nonce)))
        self._advance(held)

    def _refused(self, key: TransferKey, error: KvferryError) -> None:
        held = self._reservations.get(key)
        if held is None:
            return
        held.unanswered = False
        if held.state is GrantState.NEW:
            self._refuse(held.peer, held.transfer, error)
            self._forget(held)
        else:
            self._settle(held)

    def _cancel(self, key: TransferKey, error: KvferryError) -> None:
        held = self._reservations.get(key)
        if held is not None:
            self._fail(held, error, tell=True)

    # Link thread: what comes from the link.

    def message(self, peer: Peer, data: bytes) -> None:
        if self._peers.is_closing(peer):
            return
        try:
            message = read(data, FROM_PREFILL)
        except WireError as error:
            self._drop(peer, error)
            return
        if isinstance(message, GrantRequest):
            self._requested(peer, message)
            return
        held = self._reservations.get((peer, message.transfer))
        if held is None:
            return
        if isinstance(message, Commit):
            self._committed(held, message)
        else:
            unposted = held.state is GrantState.NEW
            self._fail(held, Cancelled(f"the prefill node gave up: {message.reason}"), tell=unposted)

    def _requested(self, peer: Peer, request: GrantRequest) -> None:
        if peer not in self._connections:
            self._connections[peer] = Connection(next(self._nonces) % MAX_NONCE + 1)
        if not self._connections[peer].is_new(request.transfer):
            return
        if request.fingerprint != self._fingerprint:
            text = (
                f"this decode node's fingerprint is {self._fingerprint}, the prefill node expects {request.fingerprint}"
            )
            self._refuse(peer, request.transfer, Incompatible(text))
        elif request.epoch != self._epoch:
            text = f"this decode node is epoch {self._epoch}, the request is for {request.epoch}"
            self._refuse(peer, request.transfer, NodeLost(text))
        else:
            held = Reservation((peer, request.transfer), request.job, self._clock() + request.job.deadline_s)
            self._reservations[held.key] = held
            self._peers.add(peer, held.transfer, held)
            self._watch()
            self._events.reserve(held.key, request.job)

    def _landing(self, held: Reservation, index: int) -> Callable[[Exception | None], None]:
        def landed(error: Exception | None) -> None:
            if error is not None:
                self._drop(held.peer, error)
                return
            held.in_flight -= 1
            if held.state is GrantState.GRANTED:
                held.state = moved(held.state, GrantState.RECEIVING)
            if held.state is not GrantState.RECEIVING:
                self._settle(held)
                return
            if is_sampled(held.transfer, index, self._verify):
                held.summing += 1
                self._checksums.take(held.buffers[index], lambda crc: self._summed(held, index, crc))
            self._advance(held)

        return landed

    def _summed(self, held: Reservation, index: int, crc: int) -> None:
        held.crcs[index] = crc
        held.summing -= 1
        self._advance(held)

    def _committed(self, held: Reservation, commit: Commit) -> None:
        if held.commit is not None or held.state not in LIVE:
            return
        if commit.block_count != held.count or len(commit.checksums) not in (0, held.count):
            text = f"commit of {commit.block_count} blocks for a grant of {held.count}"
            self._fail(held, TransferFailed(text), tell=True)
            return
        held.commit = commit
        self._advance(held)

    def _advance(self, held: Reservation) -> None:
        """LANDED when every receive completed; READY when the commit came too and every checksum agrees."""
        if held.state in (GrantState.GRANTED, GrantState.RECEIVING) and not held.in_flight:
            held.state = moved(held.state, GrantState.LANDED)
        if held.state is not GrantState.LANDED or held.commit is None or held.summing:
            return
        theirs = dict(enumerate(held.commit.checksums, held.first_block))
        for index, crc in held.crcs.items():
            if theirs.get(index, UNVERIFIED) not in (UNVERIFIED, crc):
                self._fail(held, TransferFailed(f"prompt block {index} arrived with a wrong checksum"), tell=True)
                return
        held.state = moved(held.state, GrantState.READY)
        self._link.send(held.peer, pack(CommitAck(held.transfer)))
        self._forget(held)
        self._events.ready(held.key, held.commit)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self._drop(peer, error)

    # Link thread: ends.

    def _refuse(self, peer: Peer, transfer: int, error: KvferryError) -> None:
        self._link.send(peer, pack(Refusal(transfer, error.code, error.message)))

    def _fail(self, held: Reservation, error: KvferryError, tell: bool) -> None:
        if held.state not in LIVE:
            return
        held.state = moved(held.state, GrantState.FAILED)
        if tell:
            self._refuse(held.peer, held.transfer, error)
        self._events.failed(held.key, error)
        held.state = moved(held.state, GrantState.QUIESCING)
        held.deadline = self._clock() + QUIESCE_TIMEOUT_S
        self._settle(held)

    def _settle(self, held: Reservation) -> None:
        """Report quiet when no receive is left and the engine gave its answer."""
        if held.state is GrantState.QUIESCING and not held.in_flight and not held.unanswered:
            held.state = moved(held.state, GrantState.QUIET)
            self._forget(held)
            self._events.quiet(held.key)

    def _forget(self, held: Reservation) -> None:
        self._reservations.pop(held.key, None)
        self._peers.remove(held.peer, held.transfer)

    def _drop(self, peer: Peer, error: Exception) -> None:
        """Close the connection; every grant on it fails now and is quiet when the link says so."""
        known = error if isinstance(error, KvferryError) else TransferFailed(f"{peer}: {error}")
        self._connections.pop(peer, None)

        def quiet(held: Reservation) -> None:
            held.in_flight = 0
            self._settle(held)

        self._peers.drop(peer, lambda held: self._fail(held, known, tell=False), quiet)

    def _watch(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._link.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End grants whose request's deadline has passed; close connections whose receives do not complete."""
        now = self._clock()
        for held in [h for h in self._reservations.values() if h.deadline < now]:
            if held.state in LIVE:
                self._fail(held, DeadlineExceeded("the request's deadline passed before its blocks arrived"), tell=True)
            elif held.in_flight:
                self._drop(held.peer, TransferFailed(f"receives did not complete within {QUIESCE_TIMEOUT_S:g} s"))
        self._sweeping = False
        if self._reservations:
            self._watch()
