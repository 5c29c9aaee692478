"""Outbound blocks of one grant: sends them within the send window, and collects their checksums for the commit.

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
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.link_messages import Grant

FILLER = b"\0"
FILLERS_AT_ONCE = 64
"""Fillers in flight at a time. A filler is a single byte that completes a receive for which no block is sent."""


class Outgoing:
    """Sends blocks into the receives of one grant, within the send window. Runs on the link thread.

    in_flight  number of sends that have not ended
    bytes      total size of all blocks sent or being sent
    moved()    called after each send or checksum that ends
    broken(e)  called when a send fails: the connection is unusable
    """

    def __init__(
        self,
        path: BlockPath,
        grant: Grant,
        peer: Peer,
        moved: Callable[[], None],
        broken: Callable[[Exception], None],
    ):
        self._path, self._peer, self._grant = path, peer, grant
        self._moved, self._broken = moved, broken
        self._sums = Sums(path.checksums, self._summed)
        """Checksum of every posted block; UNVERIFIED until it is known, and for blocks that are not sampled."""
        self._waiting: deque[tuple[int, int]] = deque()
        self._borrowed: dict[int, Any] = {}
        """Buffers of the memory that are being sent, by prompt block index."""
        self._block_bytes = path.memory.block_bytes
        self._unsummed = 0
        self._began_at = self._sending_s = 0.0
        self.in_flight = self.bytes = 0

    @property
    def first(self) -> int:
        """Return the index of the first granted prompt block."""
        return self._grant.first_block

    @property
    def count(self) -> int:
        """Return the number of granted blocks."""
        return self._grant.block_count

    @property
    def posted(self) -> int:
        """Return the number of blocks posted or excluded."""
        return len(self._sums.by_index)

    @property
    def complete(self) -> bool:
        """Return whether every granted block was posted."""
        return self.posted == self.count

    @property
    def in_progress(self) -> bool:
        """Return whether a send or a checksum of a posted block is queued or running."""
        return bool(self._waiting or self.in_flight or self._sums.pending)

    def post(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Queue (prompt block index, block id) pairs for sending.

        Their content must not change while `in_progress`. Indices before the first granted one are skipped. Raises
        TransferFailed at a block that was not granted or was posted before."""
        try:
            for index, block_id in blocks:
                if index < self.first:
                    continue
                if not self._is_wanted(index):
                    raise TransferFailed(f"prompt block {index} was not granted, or was already sent")
                self._sums.by_index[index] = UNVERIFIED
                self._waiting.append((index, block_id))
        finally:
            self._send()

    def exclude_rest(self) -> None:
        """Exclude the granted blocks that were not posted: complete their receives with fillers."""
        rest = [index for index in range(self.first, self.first + self.count) if self._is_wanted(index)]
        self._sums.by_index.update(dict.fromkeys(rest, UNVERIFIED))
        _Fillers(self._path, self._peer, deque(map(self._tag, rest))).send(FILLERS_AT_ONCE)

    def fill(self) -> None:
        """Stop sending blocks, and complete all remaining receives with fillers."""
        unsent = [index for index, _ in self._waiting]
        self.stop()
        unsent += [index for index in range(self.first, self.first + self.count) if self._is_wanted(index)]
        _Fillers(self._path, self._peer, deque(map(self._tag, unsent))).send(FILLERS_AT_ONCE)

    def stop(self) -> None:
        """Stop sending blocks: the connection is being closed."""
        self._waiting.clear()
        self._send()

    def closed(self) -> None:
        """Return all buffers to the memory: the connection is closed and no send is in flight any more."""
        self.in_flight = self._unsummed = 0
        while self._borrowed:
            self._path.memory.give_back(self._borrowed.popitem()[1])
        self.stop()

    def checksums(self) -> tuple[int, ...] | None:
        """Return the checksums of the posted blocks in order; empty if checksums are off, None while one is missing."""
        if self._waiting or self._unsummed or self._sums.pending:
            return None
        return tuple(value for _, value in sorted(self._sums.by_index.items())) if self._path.verify > 0 else ()

    def sent_before(self, now: float) -> float:
        """Return the time before `now` during which sends were in flight, in seconds."""
        return self._sending_s + (max(0.0, now - self._began_at) if self.in_flight else 0.0)

    def _is_wanted(self, index: int) -> bool:
        return self.first <= index < self.first + self.count and index not in self._sums.by_index

    def _send(self) -> None:
        """Send as many blocks as the window allows.

        A block occupies the window until its checksum is taken, because the acknowledgement waits for both."""
        if self._waiting:
            self._path.window.enter(self)
        while self._waiting and max(self.in_flight, self._sums.pending) < self._path.window.share(self._block_bytes):
            self._send_one(*self._waiting.popleft())
        if not self.in_progress:
            self._path.window.leave(self)

    def _send_one(self, index: int, block_id: int) -> None:
        if not self.in_flight:
            self._began_at = self._path.clock()
        buffer = self._borrowed[index] = self._path.memory.to_send(block_id)
        self.in_flight += 1
        self.bytes += self._block_bytes
        sampled = is_sampled(self._grant.transfer, index, self._path.verify)
        self._unsummed += sampled
        self._path.link.send_block(self._peer, self._tag(index), buffer, self._sending(index, sampled))

    def _tag(self, index: int) -> int:
        return block_tag(self._grant.nonce, self._grant.transfer, index)

    def _sending(self, index: int, sampled: bool) -> Done:
        """Return the callback for the end of a block's send.

        It takes the block's checksum, because the block is still in the CPU caches then."""

        def sent(error: Exception | None) -> None:
            if error is not None:
                self._broken(error)
                return
            buffer = self._borrowed.pop(index)
            give_back = partial(self._path.memory.give_back, buffer)
            if sampled:
                self._unsummed -= 1
                self._sums.take(index, buffer, give_back)
            else:
                give_back()
            self.in_flight -= 1
            if not self.in_flight:
                self._sending_s += self._path.clock() - self._began_at
            self._send()
            self._moved()

        return sent

    def _summed(self) -> None:
        self._send()
        self._moved()


class _Fillers:
    """Single bytes sent into receives that no block will complete.

    Fillers touch no block, so they do not count as in flight."""

    def __init__(self, path: BlockPath, peer: Peer, tags: deque[int]):
        self._path, self._peer, self._tags = path, peer, tags

    def send(self, count: int) -> None:
        for _ in range(min(count, len(self._tags))):
            self._path.link.send_block(self._peer, self._tags.popleft(), FILLER, self._sent)

    def _sent(self, error: Exception | None) -> None:
        if error is None:
            self.send(1)
