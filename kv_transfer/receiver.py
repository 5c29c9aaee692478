"""The decode side of ships: asks the engine for blocks, posts receives into them, verifies, hands over.

States: see receiver_grant; the blocks' way: incoming. A grant that fails is quiet when all its receives completed:
those that the sender will not fill it completes with a single byte each (see sender). Nothing is cancelled, because
UCX goes on writing after a cancel. Where the sender may not do so in time, the whole connection is closed, which makes
every receive on it quiet.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from kv_transfer.block_path import BlockPath
from kv_transfer.checksum import Checksums, ThreadedChecksums
from kv_transfer.incoming import Incoming
from kv_transfer.link import Link, Peer
from kv_transfer.ports import BlockMemory, GrantEvents, TransferKey
from kv_transfer.receiver_grant import GrantState, OpenGrant, SendingProcess
from kv_transfer.tags import MAX_BLOCKS, MAX_NONCE
from kv_transfer.transfers import QUIESCE_TIMEOUT_S, Transfers
from protocol.errors import Cancelled, DeadlineExceeded, Incompatible, KvferryError, NodeLost, TransferFailed
from protocol.link_messages import Abort, Commit, CommitAck, Grant, GrantRequest, Refusal
from protocol.wire import pack

FROM_PREFILL = GrantRequest | Commit | Abort


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
        self._link, self._events, self._clock = link, events, clock
        self._epoch, self._fingerprint = epoch, fingerprint
        self._path = BlockPath(link, memory, checksums or ThreadedChecksums(link.submit), verify)
        self._nonces = itertools.count(random.randrange(MAX_NONCE))
        self._senders: dict[Peer, SendingProcess] = {}
        self._grants: Transfers[OpenGrant] = Transfers(
            link,
            clock,
            forget=self._disconnected,
            fail=lambda grant, error: self._fail(grant, error, tell=False),
            quiet=self._closed,
            overdue=self._overdue,
        )

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
        grant = self._grants.find(key)
        assert grant is not None, f"{key} was answered twice"
        grant.unanswered = False
        if grant.state is not GrantState.NEW:
            self._settle(grant)
            return
        if first_block + len(block_ids) > MAX_BLOCKS:
            self._fail(grant, TransferFailed(f"a ship addresses at most {MAX_BLOCKS} blocks"), tell=True)
            return
        self._post(grant, first_block, block_ids)

    def _post(self, grant: OpenGrant, first_block: int, block_ids: Sequence[int]) -> None:
        """Post the receives, then tell the sender: no block ever arrives unexpected."""
        grant.move(GrantState.GRANTED)
        grant.deadline = self._clock() + grant.job.deadline_s
        message = Grant(grant.transfer, first_block, len(block_ids), self._senders[grant.peer].nonce)
        grant.blocks = Incoming(
            self._path, message, grant.peer, lambda: self._moved(grant), lambda e: self._grants.drop(grant.peer, e)
        )
        grant.blocks.post(block_ids)
        self._link.send(grant.peer, pack(message))
        self._advance(grant)

    def _refused(self, key: TransferKey, error: KvferryError) -> None:
        grant = self._grants.find(key)
        if grant is None:
            return
        grant.unanswered = False
        if grant.state is GrantState.NEW:
            self._refuse(grant.peer, grant.transfer, error)
            self._grants.remove(grant)
        else:
            self._settle(grant)

    def _cancel(self, key: TransferKey, error: KvferryError) -> None:
        grant = self._grants.find(key)
        if grant is not None:
            self._fail(grant, error, tell=True)

    # Link thread: what comes from the link.

    def message(self, peer: Peer, data: bytes) -> None:
        message = self._grants.read(peer, data, FROM_PREFILL)
        if message is None:
            return
        if isinstance(message, GrantRequest):
            self._requested(peer, message)
            return
        grant = self._grants.find((peer, message.transfer))
        if grant is None:
            return
        if isinstance(message, Commit):
            self._committed(grant, message)
        else:
            unposted = grant.state is GrantState.NEW
            self._fail(grant, Cancelled(f"the prefill node gave up: {message.reason}"), tell=unposted)

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self._grants.drop(peer, error)

    def _requested(self, peer: Peer, request: GrantRequest) -> None:
        if peer not in self._senders:
            self._senders[peer] = SendingProcess(next(self._nonces) % MAX_NONCE + 1)
        if not self._senders[peer].is_new(request.transfer):
            return
        objection = _objection(request, self._fingerprint, self._epoch)
        if objection is not None:
            self._refuse(peer, request.transfer, objection)
        else:
            grant = OpenGrant((peer, request.transfer), request.job, self._clock() + request.job.deadline_s)
            self._grants.add(grant)
            self._events.reserve(grant.key, request.job)

    def _committed(self, grant: OpenGrant, commit: Commit) -> None:
        if grant.commit is not None or not grant.live:
            return
        count = grant.blocks.count if grant.blocks else 0
        if commit.block_count != count or len(commit.checksums) not in (0, count):
            text = f"commit of {commit.block_count} blocks for a grant of {count}"
            self._fail(grant, TransferFailed(text), tell=True)
            return
        grant.commit = commit
        self._advance(grant)

    def _moved(self, grant: OpenGrant) -> None:
        """A block landed, or its checksum was taken."""
        if grant.state is GrantState.GRANTED:
            grant.move(GrantState.RECEIVING)
        self._advance(grant)
        self._settle(grant)

    def _advance(self, grant: OpenGrant) -> None:
        """LANDED when every receive completed; READY when the commit came too and every checksum agrees."""
        if grant.state in (GrantState.GRANTED, GrantState.RECEIVING) and not grant.in_flight:
            grant.move(GrantState.LANDED)
        if grant.state is not GrantState.LANDED or grant.commit is None or grant.blocks is None or grant.blocks.summing:
            return
        wrong = grant.blocks.wrong(grant.commit.checksums)
        if wrong is not None:
            self._fail(grant, TransferFailed(f"prompt block {wrong} arrived with a wrong checksum"), tell=True)
            return
        grant.move(GrantState.READY)
        self._link.send(grant.peer, pack(CommitAck(grant.transfer)))
        self._grants.remove(grant)
        self._events.ready(grant.key, grant.commit)

    # Link thread: ends.

    def _refuse(self, peer: Peer, transfer: int, error: KvferryError) -> None:
        self._link.send(peer, pack(Refusal(transfer, error.code, error.message)))

    def _fail(self, grant: OpenGrant, error: KvferryError, tell: bool) -> None:
        if not grant.live:
            return
        grant.move(GrantState.FAILED)
        if grant.blocks is not None:
            grant.blocks.give_up()
        if tell:
            self._refuse(grant.peer, grant.transfer, error)
        self._events.failed(grant.key, error)
        grant.move(GrantState.QUIESCING)
        grant.deadline = self._clock() + QUIESCE_TIMEOUT_S
        self._settle(grant)

    def _settle(self, grant: OpenGrant) -> None:
        """Report quiet when no receive is left and the engine gave its answer."""
        if grant.state is GrantState.QUIESCING and not grant.in_flight and not grant.unanswered:
            grant.move(GrantState.QUIET)
            self._grants.remove(grant)
            self._events.quiet(grant.key)

    def _disconnected(self, peer: Peer) -> None:
        self._senders.pop(peer, None)

    def _closed(self, grant: OpenGrant) -> None:
        if grant.blocks is not None:
            grant.blocks.in_flight = 0
        self._settle(grant)

    def _overdue(self, grant: OpenGrant) -> None:
        """End grants whose request's deadline has passed; close connections whose receives do not complete."""
        if grant.live:
            self._fail(grant, DeadlineExceeded("the request's deadline passed before its blocks arrived"), tell=True)
        elif grant.in_flight:
            self._grants.drop(grant.peer, TransferFailed(f"receives did not complete within {QUIESCE_TIMEOUT_S:g} s"))


def _objection(request: GrantRequest, fingerprint: str, epoch: int) -> KvferryError | None:
    """Why this process cannot grant what was asked, if so."""
    if request.fingerprint != fingerprint:
        return Incompatible(
            f"this decode node's fingerprint is {fingerprint}, the prefill node expects {request.fingerprint}"
        )
    if request.epoch != epoch:
        return NodeLost(f"this decode node is epoch {epoch}, the request is for {request.epoch}")
    return None
