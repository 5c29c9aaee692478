"""Inbound blocks of one grant: posts receives into the pool, and compares checksums with the sender's.

This module knows no jobs and no tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvferry.kv_transfer.block_path import BlockPath
from kvferry.kv_transfer.checksum import UNVERIFIED, Sums, is_sampled
from kvferry.kv_transfer.link import Done, Peer
from kvferry.kv_transfer.tags import block_tag
from kvferry.protocol.link_messages import Grant


class Incoming:
    """Receives the prompt blocks of one grant into memory. Runs on the link thread.

    in_flight  receives not completed, including those not posted yet
    moved()    called after each block that arrives and each checksum that is computed
    broken(e)  called when a receive fails: the connection must be closed
    """

    def __init__(
        self,
        path: BlockPath,
        grant: Grant,
        block_ids: Sequence[int],
        peer: Peer,
        moved: Callable[[], None],
        broken: Callable[[Exception], None],
    ):
        self._path, self._grant, self._peer = path, grant, peer
        self._moved, self._broken = moved, broken
        self._unposted = deque(enumerate(block_ids, grant.first_block))
        self._sums = Sums(path.checksums, moved)
        self._borrowed: dict[int, Any] = {}
        """Buffers of the memory that are being filled, by prompt block index."""
        self._given_up = False
        self.in_flight = grant.block_count

    @property
    def count(self) -> int:
        """Return the number of granted blocks."""
        return self._grant.block_count

    @property
    def summing(self) -> int:
        """Return the number of checksums in progress."""
        return self._sums.pending

    @property
    def posted(self) -> bool:
        """Return whether all receives are posted."""
        return not self._unposted

    def post(self, most: int) -> None:
        """Post up to `most` more receives, under the tags that the sender uses."""
        transfer = self._grant.transfer
        for _ in range(min(most, len(self._unposted))):
            index, block_id = self._unposted.popleft()
            buffer = self._borrowed[index] = self._path.memory.to_fill(block_id)
            tag = block_tag(self._grant.nonce, transfer, index)
            self._path.link.receive_block(self._peer, tag, buffer, self._landing(index, block_id))

    def ignore_rest(self) -> None:
        """Ignore all later blocks and their checksums: a receive that completes from now on may contain a filler."""
        self._given_up = True

    def closed(self) -> None:
        """Return all buffers to the memory: the connection is closed and no receive touches memory any more."""
        self.in_flight = 0
        while self._borrowed:
            self._path.memory.give_back(self._borrowed.popitem()[1])

    def wrong(self, theirs: Sequence[int]) -> int | None:
        """Return the first prompt block whose checksum differs from the sender's, or None.

        theirs: empty if the sender took no checksums."""
        known = dict(enumerate(theirs, self._grant.first_block))
        differing = (i for i, ours in self._sums.by_index.items() if known.get(i, UNVERIFIED) not in (UNVERIFIED, ours))
        return next(differing, None)

    def _landing(self, index: int, block_id: int) -> Done:
        sampled = is_sampled(self._grant.transfer, index, self._path.verify)

        def landed(error: Exception | None) -> None:
            if error is not None:
                self._broken(error)
                return
            buffer, memory = self._borrowed.pop(index), self._path.memory
            give_back = partial(memory.give_back, buffer)
            if not self._given_up:
                memory.landed(block_id, buffer)
            if sampled and not self._given_up:
                self._sums.take(index, buffer, give_back)
            else:
                give_back()
            self.in_flight -= 1
            self._moved()

        return landed
