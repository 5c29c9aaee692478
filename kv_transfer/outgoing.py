"""The blocks of one transfer on their way out. This module knows no job and no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.block_path import BlockPath
from kv_transfer.checksum import UNVERIFIED, is_sampled
from kv_transfer.link import Peer
from kv_transfer.tags import block_tag
from protocol.errors import TransferFailed
from protocol.link_messages import Grant

FILLER = b"\0"


class Outgoing:
    """Sends blocks into the receives that a grant stands for. Runs on the link thread.

    in_flight  posted sends not ended; bytes: of all blocks posted
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
        self._crcs: dict[int, int] = {}
        self._summing = 0
        self.in_flight = self.bytes = 0

    @property
    def first(self) -> int:
        return self._grant.first_block

    @property
    def count(self) -> int:
        return self._grant.block_count

    @property
    def posted(self) -> int:
        return len(self._crcs)

    @property
    def complete(self) -> bool:
        """Whether every granted block was posted."""
        return self.posted == self.count

    def post(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Send (prompt block index, block id) pairs, whose content is final until no send is in flight; those before
        the first granted one are skipped. Raises TransferFailed at one that is not granted or was posted before."""
        for index, block_id in blocks:
            if index < self.first:
                continue
            if not self._is_wanted(index):
                raise TransferFailed(f"prompt block {index} was not granted, or was shipped before")
            self._post(index, self._path.memory.block(block_id))

    def _is_wanted(self, index: int) -> bool:
        return self.first <= index < self.first + self.count and index not in self._crcs

    def _post(self, index: int, buffer: Any) -> None:
        self.in_flight += 1
        self.bytes += buffer.nbytes
        self._crcs[index] = UNVERIFIED
        self._path.link.send_block(self._peer, self._tag(index), buffer, self._sent)
        if is_sampled(self._grant.transfer, index, self._path.verify):
            self._summing += 1
            self._path.checksums.take(buffer, lambda crc: self._summed(index, crc))

    def fill(self) -> None:
        """Complete the receives that no block was posted for."""
        for index in range(self.first, self.first + self.count):
            if self._is_wanted(index):
                self._path.link.send_block(self._peer, self._tag(index), FILLER, lambda error: None)

    def checksums(self) -> tuple[int, ...] | None:
        """Of the posted blocks, in their order; empty where none are taken, None while some still are."""
        if self._summing:
            return None
        return tuple(crc for _, crc in sorted(self._crcs.items())) if self._path.verify > 0 else ()

    def _tag(self, index: int) -> int:
        return block_tag(self._grant.nonce, self._grant.transfer, index)

    def _sent(self, error: Exception | None) -> None:
        if error is not None:
            self._broken(error)
            return
        self.in_flight -= 1
        self._moved()

    def _summed(self, index: int, crc: int) -> None:
        self._crcs[index] = crc
        self._summing -= 1
        self._moved()
