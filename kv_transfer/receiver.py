"""Receiving side of a ship (transfer of KV blocks, on any node): reserves, receives, verifies and hands over blocks.

States: see receiver_grant. Block receives: see incoming. A failed grant is quiet (its memory is not written any more)
when all its receives have completed: the sender ends each receive that it will not fill by sending one byte (see
sender). Nothing is cancelled, because UCX continues to write after a cancel. If the sender does not complete them in
time, the whole connection is closed, which makes every receive on it quiet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvferry.kv_transfer.dock import QUIESCE_TIMEOUT_S, Dock
from kvferry.kv_transfer.incoming import Incoming
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.ports import GrantEvents, TransferKey
from kvferry.kv_transfer.receiver_grant import COMMIT_TIMEOUT_S, GrantState, OpenGrant, mismatch
from kvferry.kv_transfer.retransmission import Senders
from kvferry.kv_transfer.tags import MAX_BLOCKS
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol.errors import BlocksCorrupt, Cancelled, KvferryError, TransferFailed
from kvferry.protocol.link_messages import Abort, Commit, CommitAck, Grant, GrantRequest, Refusal
from kvferry.protocol.messages import Job

POSTED_AT_ONCE = 128
"""Number of receives posted in one turn of the link thread."""


class Receiver:
    """Receiving side of ships on a dock. Implements kv_transfer.dock.Endpoint.

    `granted`, `refused` and `cancel` may be called from any thread; everything else runs on the link thread.

    epoch        epoch of this process: requests for another epoch are refused with fenced
    fingerprint  fingerprint of this node: requests for another one are refused with incompatible
    """

    takes = (GrantRequest, Commit, Abort)

    def __init__(self, dock: Dock, events: GrantEvents, epoch: int, fingerprint: str):
        self._dock, self._events = dock, events
        self._epoch, self._fingerprint = epoch, fingerprint
        self._senders = Senders(dock.send)
        self.transfers: Transfers[OpenGrant] = Transfers(dock.watch)
        dock.mount(self)

    # Called from any thread.

    def granted(self, key: TransferKey, first_block: int, block_ids: Sequence[int]) -> None:
        """Grant the request with reserved blocks.

        block_ids: for prompt blocks first_block, first_block + 1, …; the engine already holds earlier ones."""
        self._dock.submit(lambda: self._granted(key, first_block, block_ids))

    def refused(self, key: TransferKey, error: KvferryError) -> None:
        """Refuse the request with this error: the engine cannot reserve blocks."""
        self._dock.submit(lambda: self._refused(key, error))

    def cancel(self, key: TransferKey, error: KvferryError) -> None:
        """Cancel the grant: `failed` is called with this error, then `quiet`. Do nothing if the grant has ended."""
        self._dock.submit(lambda: self._cancel(key, error))

    # Link thread: answers of the engine.

    def _granted(self, key: TransferKey, first_block: int, block_ids: Sequence[int]) -> None:
        grant = self.transfers.find(key)
        assert grant is not None, f"{key} was granted twice"
        grant.unanswered = False
        if grant.state is not GrantState.NEW:
            self._settle(grant)
            return
        if first_block + len(block_ids) > MAX_BLOCKS:
            self._fail(grant, TransferFailed(f"a transfer can have at most {MAX_BLOCKS} blocks"), notify=True)
            return
        self._post(grant, first_block, block_ids)

    def _post(self, grant: OpenGrant, first_block: int, block_ids: Sequence[int]) -> None:
        """Begin posting the grant's receives."""
        grant.move(GrantState.GRANTED)
        grant.deadline = self._dock.clock() + grant.purpose.deadline_s
        message = Grant(grant.transfer, first_block, len(block_ids), self._senders.of(grant.peer).nonce)
        grant.message, moved = message, partial(self._moved, grant)
        grant.blocks = Incoming(
            self._dock.path, message, block_ids, grant.peer, moved, lambda e: self._dock.drop(grant.peer, e)
        )
        self._post_more(grant, POSTED_AT_ONCE)

    def _post_more(self, grant: OpenGrant, most: int) -> None:
        """Post up to `most` receives; after the last one, send the grant. So no block arrives before its receive.

        A long prompt has thousands of receives. They are posted in slices, so that other ships proceed in between."""
        assert grant.blocks is not None
        grant.blocks.post(most)
        if grant.blocks.posted:
            assert grant.message is not None
            self._senders.answer(grant.peer, grant.message)
            self._advance(grant)
        else:
            self._dock.submit(lambda: self._post_more(grant, POSTED_AT_ONCE) if grant.live else None)

    def _refused(self, key: TransferKey, error: KvferryError) -> None:
        grant = self.transfers.find(key)
        if grant is None:
            return
        grant.unanswered = False
        if grant.state is GrantState.NEW:
            self._refuse(grant.peer, grant.transfer, error)
            self.transfers.remove(grant)
        else:
            self._settle(grant)

    def _cancel(self, key: TransferKey, error: KvferryError) -> None:
        grant = self.transfers.find(key)
        if grant is not None:
            self._fail(grant, error, notify=True)

    # Link thread: calls of the dock.

    def take(self, peer: Peer, message: Any) -> None:
        if isinstance(message, GrantRequest):
            self._requested(peer, message)
            return
        grant = self.transfers.find((peer, message.transfer))
        if grant is None:
            self._senders.repeat(peer, message.transfer)
        elif isinstance(message, Commit):
            self._committed(grant, message)
        else:
            ungranted = grant.state is GrantState.NEW
            self._fail(grant, Cancelled(f"the sender aborted: {message.reason}"), notify=ungranted)

    def forget(self, peer: Peer) -> None:
        self._senders.forget(peer)

    def fail(self, grant: OpenGrant, error: KvferryError) -> None:
        self._fail(grant, error, notify=False)

    def closed(self, grant: OpenGrant) -> None:
        if grant.blocks is not None:
            grant.blocks.closed()
        self._settle(grant)

    def overdue(self, grant: OpenGrant) -> None:
        """Fail a grant whose request's deadline has passed; close a connection whose receives do not complete."""
        if grant.live:
            self._fail(grant, grant.deadline_error(), notify=True)
        elif grant.in_flight:
            self._dock.drop(grant.peer, TransferFailed(f"receives did not complete within {QUIESCE_TIMEOUT_S:g} s"))

    # Link thread: messages from the sender.

    def _requested(self, peer: Peer, request: GrantRequest) -> None:
        known = self.transfers.find((peer, request.transfer)) is not None
        if known or not self._senders.of(peer).is_new(request.transfer):
            self._senders.repeat(peer, request.transfer)
            return
        refused = mismatch(request, self._fingerprint, self._epoch)
        if refused is not None:
            self._refuse(peer, request.transfer, refused)
        else:
            purpose = request.asked
            grant = OpenGrant((peer, request.transfer), purpose, self._dock.clock() + purpose.deadline_s)
            self.transfers.add(grant)
            self._events.reserve(grant.key, purpose)

    def _committed(self, grant: OpenGrant, commit: Commit) -> None:
        if grant.commit is not None or not grant.live:
            return
        if commit.block_count != grant.count or len(commit.checksums) not in (0, grant.count):
            text = f"commit of {commit.block_count} blocks for a grant of {grant.count}"
            self._fail(grant, TransferFailed(text), notify=True)
            return
        if (commit.first is None) == isinstance(grant.purpose, Job):
            text = "a commit carries a first token if and only if its grant is for a job"
            self._fail(grant, TransferFailed(text), notify=True)
            return
        grant.commit = commit
        self._advance(grant)

    def _moved(self, grant: OpenGrant) -> None:
        """Advance the grant after a block arrived or its checksum was taken."""
        if grant.state is GrantState.GRANTED:
            grant.move(GrantState.RECEIVING)
        if not grant.live:
            grant.deadline = self._dock.clock() + QUIESCE_TIMEOUT_S
        self._advance(grant)
        self._settle(grant)

    def _advance(self, grant: OpenGrant) -> None:
        """Move to LANDED when every receive has completed, and to READY once committed with matching checksums."""
        if grant.state in (GrantState.GRANTED, GrantState.RECEIVING) and not grant.in_flight:
            grant.move(GrantState.LANDED)
            if grant.count:
                grant.deadline = min(grant.deadline, self._dock.clock() + COMMIT_TIMEOUT_S)
        if grant.state is not GrantState.LANDED or grant.commit is None or grant.blocks is None or grant.blocks.summing:
            return
        wrong = grant.blocks.wrong(grant.commit.checksums)
        if wrong is not None:
            self._fail(grant, BlocksCorrupt(f"prompt block {wrong} arrived with a wrong checksum"), notify=True)
            return
        grant.move(GrantState.READY)
        self._senders.answer(grant.peer, CommitAck(grant.transfer))
        self.transfers.remove(grant)
        self._events.ready(grant.key, grant.commit)

    # Link thread: the end of a grant.

    def _refuse(self, peer: Peer, transfer: int, error: KvferryError) -> None:
        self._senders.answer(peer, Refusal(transfer, error.code, error.message))

    def _fail(self, grant: OpenGrant, error: KvferryError, notify: bool) -> None:
        if not grant.live:
            return
        grant.move(GrantState.FAILED)
        if grant.blocks is not None:
            grant.blocks.ignore_rest()
            if not grant.blocks.posted and not self._dock.is_closing(grant.peer):
                self._post_more(grant, grant.blocks.count)  # the sender ends receives only of a grant it received
        if notify:
            self._refuse(grant.peer, grant.transfer, error)
        self._events.failed(grant.key, error)
        grant.move(GrantState.QUIESCING)
        grant.deadline = self._dock.clock() + QUIESCE_TIMEOUT_S
        self._settle(grant)

    def _settle(self, grant: OpenGrant) -> None:
        """Call `quiet` when no receive is left and the engine has answered `reserve`."""
        if grant.state is GrantState.QUIESCING and not grant.in_flight and not grant.unanswered:
            grant.move(GrantState.QUIET)
            self.transfers.remove(grant)
            self._events.quiet(grant.key)
