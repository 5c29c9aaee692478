"""Outbound blocks of one transfer.

This module knows no job and no token."""

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
"""Fillers that are posted at a time."""


class Outgoing:
    """Sends blocks into the receives that a grant stands for, a few at a time (see window). Runs on the link thread.

    in_flight  sends not ended
    bytes      of all blocks sent or being sent
    moved()    runs after every send and every checksum that ended
    broken(e)  runs when a send failed: no more may be expected of the connection
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
        """Of every block that was posted; UNVERIFIED until its own is known, and where none is taken."""
        self._waiting: deque[tuple[int, int]] = deque()
        self._lent: dict[int, Any] = {}
        """By prompt block, what is being sent of the memory's."""
        self._block_bytes = path.memory.block_bytes
        self._unsummed = 0
        self._began_at = self._sending_s = 0.0
        self.in_flight = self.bytes = 0

    @property
    def first(self) -> int:
        return self._grant.first_block

    @property
    def count(self) -> int:
        return self._grant.block_count

    @property
    def posted(self) -> int:
        return len(self._sums.by_index)

    @property
    def complete(self) -> bool:
        """Return whether every granted block was posted."""
        return self.posted == self.count

    @property
    def under_way(self) -> bool:
        """Return whether a send or a checksum is to end, of blocks posted so far."""
        return bool(self._waiting or self.in_flight or self._sums.pending)

    def post(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Send (prompt block index, block id) pairs, whose content is final until nothing is under way; those before
        the first granted one are skipped. Raises TransferFailed at one that is not granted or was posted before."""
        try:
            for index, block_id in blocks:
                if index < self.first:
                    continue
                if not self._is_wanted(index):
                    raise TransferFailed(f"prompt block {index} was not granted, or was shipped before")
                self._sums.by_index[index] = UNVERIFIED
                self._waiting.append((index, block_id))
        finally:
            self._send()

    def leave_out(self) -> None:
        """The granted blocks that were not posted have nothing in them that is wanted: complete their receives."""
        rest = [index for index in range(self.first, self.first + self.count) if self._is_wanted(index)]
        self._sums.by_index.update(dict.fromkeys(rest, UNVERIFIED))
        _Fillers(self._path, self._peer, deque(map(self._tag, rest))).send(FILLERS_AT_ONCE)

    def fill(self) -> None:
        """Send no more blocks: complete the receives that none was sent for."""
        unsent = [index for index, _ in self._waiting]
        self.stop()
        unsent += [index for index in range(self.first, self.first + self.count) if self._is_wanted(index)]
        _Fillers(self._path, self._peer, deque(map(self._tag, unsent))).send(FILLERS_AT_ONCE)

    def stop(self) -> None:
        """Send no more blocks: the connection is being closed."""
        self._waiting.clear()
        self._send()

    def closed(self) -> None:
        """The connection is closed: no send is in flight any more."""
        self.in_flight = self._unsummed = 0
        while self._lent:
            self._path.memory.give_back(self._lent.popitem()[1])
        self.stop()

    def checksums(self) -> tuple[int, ...] | None:
        """Return the checksums of the posted blocks in order; empty where none are taken, None while some still are."""
        if self._waiting or self._unsummed or self._sums.pending:
            return None
        return tuple(value for _, value in sorted(self._sums.by_index.items())) if self._path.verify > 0 else ()

    def sent_before(self, now: float) -> float:
        """Seconds until now in which sends were in flight."""
        return self._sending_s + (max(0.0, now - self._began_at) if self.in_flight else 0.0)

    def _is_wanted(self, index: int) -> bool:
        return self.first <= index < self.first + self.count and index not in self._sums.by_index

    def _send(self) -> None:
        """As many as the window has room for.

        A block takes room until its checksum is there too: the acknowledgement waits for both."""
        if self._waiting:
            self._path.window.enter(self)
        while self._waiting and max(self.in_flight, self._sums.pending) < self._path.window.share(self._block_bytes):
            self._send_one(*self._waiting.popleft())
        if not self.under_way:
            self._path.window.leave(self)

    def _send_one(self, index: int, block_id: int) -> None:
        if not self.in_flight:
            self._began_at = self._path.clock()
        buffer = self._lent[index] = self._path.memory.to_send(block_id)
        self.in_flight += 1
        self.bytes += self._block_bytes
        sampled = is_sampled(self._grant.transfer, index, self._path.verify)
        self._unsummed += sampled
        self._path.link.send_block(self._peer, self._tag(index), buffer, self._sending(index, sampled))

    def _tag(self, index: int) -> int:
        return block_tag(self._grant.nonce, self._grant.transfer, index)

    def _sending(self, index: int, sampled: bool) -> Done:
        """What is called once a block was sent, and so is still in the caches."""

        def sent(error: Exception | None) -> None:
            if error is not None:
                self._broken(error)
                return
            buffer = self._lent.pop(index)
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
    """Single bytes into receives that no block will complete. They touch no block, so nobody waits for them here."""

    def __init__(self, path: BlockPath, peer: Peer, tags: deque[int]):
        self._path, self._peer, self._tags = path, peer, tags

    def send(self, count: int) -> None:
        for _ in range(min(count, len(self._tags))):
            self._path.link.send_block(self._peer, self._tags.popleft(), FILLER, self._sent)

    def _sent(self, error: Exception | None) -> None:
        if error is None:
            self.send(1)
