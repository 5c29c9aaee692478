"""MissReasons: why blocks that a router expected in this node's cache are missing (evicted, not arrived, …)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvferry.protocol.prefix_reuse import Missed

if TYPE_CHECKING:
    from kvferry.engine.request import Request

REMEMBERED = 4
"""Limit of hashes remembered after their blocks were evicted, as a multiple of the pool's blocks."""

EVICTED = "evicted"
"""Reason of blocks that were evicted to make room for new ones."""


class MissReasons:
    """Hashes of evicted or expected blocks, with the reason why each is missing. Owned by the engine thread.

    When full, the older half is forgotten at once.

    epoch   of this process if it is part of a cluster: blocks of an earlier epoch of its name are lost
    """

    def __init__(self, num_blocks: int) -> None:
        self.epoch = 0
        self._half = max(1, REMEMBERED * num_blocks // 2)
        self._young: dict[bytes, str] = {}
        self._old: dict[bytes, str] = {}

    def note(self, hashes: Iterable[bytes], reason: str) -> None:
        """Note that these blocks are not here, and why.

        reason: `evicted`, `retracted`, or `not_arrived` and `computing` for blocks that are awaited, which stays their
        reason if they never come."""
        for block_hash in hashes:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[block_hash] = reason

    def arrived(self, block_hash: bytes) -> None:
        """Note that the block is here."""
        self._young.pop(block_hash, None)
        self._old.pop(block_hash, None)

    def missed(self, request: Request) -> Missed:
        """Return why predicted tokens (Job.predicted) after the request's cached ones are missing."""
        start, block_size, hashes = request.computed_len, request.block_size, request.hashes
        until, epoch = request.job.predicted
        if start >= until:
            return ()
        if epoch and self.epoch and epoch != self.epoch:
            return (("fenced", until - start),)
        runs: list[tuple[str, int]] = []
        for index in range(start // block_size, (until - 1) // block_size + 1):
            tokens = min(until, (index + 1) * block_size) - max(start, index * block_size)
            reason = self.reason(hashes[index]) if index < len(hashes) else "unknown"
            if runs and runs[-1][0] == reason:
                tokens += runs.pop()[1]
            runs.append((reason, tokens))
        return tuple(runs)

    def reason(self, block_hash: bytes) -> str:
        """Return the noted reason, or unknown."""
        return self._young.get(block_hash) or self._old.get(block_hash) or "unknown"
