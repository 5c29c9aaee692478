"""RequestMedia: one request's media in the engine: their part of block hashes, their rows, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvferry.protocol.errors import StepFailed
from kvferry.protocol.media import block_extras
from kvferry.protocol.messages import Job


class RequestMedia:
    """Media of one request's prompt, in order. Owned by the engine thread.

    extras: bytes that the hashes of its blocks cover besides tokens, by block number. offset: see `Job.rope_offset`.
    rows: those that are here, by the item's place in `items`, until the K/V of their tokens is computed. rope: int64
    [3, n], rotary positions of the tokens up to the last medium's end, once they are known. bidirectional: see
    `MediaEncoder`. cancel: of the call for rows that are to come"""

    __slots__ = ("_block_size", "bidirectional", "cancel", "extras", "items", "offset", "rope", "rows")

    def __init__(self, job: Job, block_size: int) -> None:
        self.items, self.offset = job.media, job.rope_offset
        self.extras = block_extras(job.media, block_size)
        self.rows: dict[int, torch.Tensor] = {}
        self.rope: np.ndarray | None = None
        self.bidirectional = False
        self.cancel: Callable[[], None] | None = None
        self._block_size = block_size

    @property
    def end(self) -> int:
        """Return the place of the first token after the last medium."""
        return self.items[-1].offset + self.items[-1].length

    @property
    def shifted(self) -> bool:
        """Return whether rotary positions differ from places."""
        return self.offset != 0 or self.rope is not None

    def missing(self, start: int) -> list[int]:
        """Return the places of the items whose rows are needed to compute the tokens from `start` on, and not here."""
        ends = ((place, item.offset + item.length) for place, item in enumerate(self.items))
        return [place for place, end in ends if end > start and place not in self.rows]

    def computed(self, length: int) -> None:
        """Drop the rows of items that lie in the first `length` tokens."""
        for place in [p for p in self.rows if self.items[p].offset + self.items[p].length <= length]:
            del self.rows[place]

    def forget(self) -> None:
        """Drop all rows and cancel the call for missing ones: the request ended, or lost its blocks."""
        self.rows.clear()
        if self.cancel is not None:
            self.cancel()
            self.cancel = None

    def part_of(self, parent: bytes, start: int) -> bytes:
        """Return the key of partial blocks that begin at `start`, after the block that hashes to `parent`."""
        return parent + self.extras.get(start // self._block_size, b"")

    def rows_of(self, start: int, count: int) -> list[tuple[int, torch.Tensor]]:
        """Return runs of rows for `count` tokens from `start` on, each with its place after `start`.

        Raises StepFailed if some are not here, which is a bug."""
        runs = []
        for place, item in enumerate(self.items):
            first, end = max(start, item.offset), min(start + count, item.offset + item.length)
            if first < end:
                if (rows := self.rows.get(place)) is None:
                    raise StepFailed("embeddings of media are missing")
                runs.append((first - start, rows[first - item.offset : end - item.offset]))
        return runs

    def positions(self, start: int, count: int) -> np.ndarray:
        """Return int64 [3, count], the rotary positions of `count` tokens from `start` on."""
        found = np.tile(np.arange(start, start + count, dtype=np.int64) + self.offset, (3, 1))
        if self.rope is not None and start < self.rope.shape[1]:
            known = self.rope[:, start : start + count]
            found[:, : known.shape[1]] = known
        return found

    def seen_until(self, start: int, count: int) -> np.ndarray:
        """Return int32 [count], the last position that each of `count` tokens from `start` on attends to."""
        found = np.arange(start, start + count, dtype=np.int32)
        for item in self.items if self.bidirectional else ():
            end = item.offset + item.length
            found[max(0, item.offset - start) : max(0, end - start)] = end - 1
        return found

    def whole(self, start: int, count: int) -> int:
        """Return how many tokens from `start` on a step computes in place of `count`, which may cut through an item.

        It ends before such an item, or after it if it is the first one."""
        for item in self.items if self.bidirectional else ():
            end = item.offset + item.length
            if item.offset < start + count < end:
                return item.offset - start if item.offset > start else end - start
        return count


def placed(runs: Sequence[tuple[int, torch.Tensor]]) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return the tokens int64 [n] of a batch that have rows, and these rows [n, width]; None if there are none."""
    if not runs:
        return np.empty(0, np.int64), None
    tokens = np.concatenate([np.arange(at, at + len(rows), dtype=np.int64) for at, rows in runs])
    return tokens, runs[0][1] if len(runs) == 1 else torch.cat([rows for _, rows in runs])
