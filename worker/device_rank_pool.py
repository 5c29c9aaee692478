"""KV pools of a node's ranks with one device each, presented as one pool to the link and the tiers.

Whole blocks pass through rows of host memory. Each rank of this host reads or writes its own part of a row; ranks of
other hosts exchange their parts over channels (`worker.hosts.remote_parts`)."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.kv_transfer.checksum import Checksums, InlineChecksums
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.protocol.errors import reason
from kvferry.runtime.limits import available_memory
from kvferry.runtime.rank_channel import RankChannel, RankZeroChannels
from kvferry.worker.block_parts import Move, Segments
from kvferry.worker.hosts.remote_parts import RemotePart
from kvferry.worker.pool_memory import GIB, MEMORY_MARGIN
from kvferry.worker.shared_rows import SharedRows

GROWTH, MOST = 64 << 20, 256
"""Bytes, and maximum rows, by which the link's row buffer grows at a time.

The buffer never shrinks: it keeps as many rows as were ever in flight at once."""


class DeviceRankPool(BlockMemory):
    """Pool of all ranks, used on rank 0; the other ranks run `follow`.

    Implements `kv_transfer.ports.BlockMemory` for the link thread, and `kv_transfer.tiers.staging.Copies` for any
    thread. Tiers pass block ids as blocks.

    Calls raise DeviceLost once a rank has failed to move its part, or once host memory for the link's rows has run out:
    it is then unknown which parts moved. `lost` says why. The node must end then; link and tiers survive the exception.

    others: number of ranks besides this one. remote: parts of the ranks that run on other hosts."""

    def __init__(
        self,
        own: Segments,
        rows: SharedRows,
        lines: RankZeroChannels,
        others: int,
        block_bytes: int,
        remote: Sequence[RemotePart] = (),
    ) -> None:
        self._own, self._rows, self._lines, self._others, self._remote = own, rows, lines, others, remote
        self._block_bytes = block_bytes
        self._lock, self.lost = threading.Lock(), ""
        self._numbers: dict[int, int] = {}
        """Number of each row by its memory address."""
        self._spare: list[np.ndarray] = []

    # Called on the link thread.

    @property
    def block_bytes(self) -> int:
        """Return the size of a whole block in bytes."""
        return self._block_bytes

    def block(self, block_id: int) -> int:
        """Return the block id itself."""
        return block_id

    def to_fill(self, block_id: int) -> np.ndarray:
        """Return a free row for a block to receive. Raises DeviceLost if host memory runs out."""
        if not self._spare:
            try:
                self._spare += self.room(max(1, min(GROWTH // self._block_bytes, MOST)))
            except MemoryError as error:
                self.lost = str(error)
                raise DeviceLost(self.lost) from error
        return self._spare.pop()

    def to_send(self, block_id: int) -> np.ndarray:
        """Return a row with the block's bytes, gathered from all ranks."""
        row = self.to_fill(block_id)
        self.to_host([block_id], [row])
        return row

    def landed(self, block_id: int, buffer: np.ndarray) -> None:
        """Copy a received row into the block on all ranks."""
        self.to_device([buffer], [block_id])

    def give_back(self, buffer: np.ndarray) -> None:
        """Return a row to the free list."""
        self._spare.append(buffer)

    def checksums(self, submit: Callable[[Callable[[], None]], None], prepare: Callable[[], None]) -> Checksums:
        """Return checksums that are computed on the link thread.

        As in `PoolMemory.checksums`, this is the choice for blocks in host memory, which rows are."""
        return InlineChecksums()

    # Called by the tiers, from any thread.

    def copies(self) -> DeviceRankPool:
        """Return this pool, which copies blocks for the tiers."""
        return self

    def room(self, blocks: int) -> Sequence[np.ndarray]:
        """Allocate rows of host memory for `blocks` blocks. Raises MemoryError or DeviceLost."""
        size, left = blocks * self._block_bytes, available_memory()
        if size > MEMORY_MARGIN * left:
            what = f"blocks need {size / GIB:.2f} GiB more of the host's memory, of which {left / GIB:.2f} are left"
            raise MemoryError(what)
        with self._lock:
            rows = {number: self._rows[number].numpy() for number in self._together(blocks)}
        self._numbers.update((_address(row), number) for number, row in rows.items())
        return list(rows.values())

    def to_host(self, blocks: Sequence[Any], rows: Sequence[np.ndarray]) -> None:
        """Copy blocks from all ranks into rows."""
        self._move(blocks, rows, out=True)

    def to_device(self, rows: Sequence[np.ndarray], blocks: Sequence[Any]) -> None:
        """Copy rows into blocks on all ranks."""
        self._move(blocks, rows, out=False)

    def _move(self, blocks: Sequence[int], rows: Sequence[np.ndarray], *, out: bool) -> None:
        move = Move(tuple(blocks), tuple(self._numbers[_address(row)] for row in rows), out)
        with self._lock:
            self._together(move)

    def _together(self, call: int | Move) -> Sequence[int]:
        """Run one call on all ranks at the same time, see `_do`. Raises DeviceLost."""
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            self._lines.broadcast(pickle.dumps(call))
            rows = [self._rows[number] for number in call.rows] if isinstance(call, Move) else []
            if isinstance(call, Move) and not call.out:
                for part in self._remote:
                    part.send(rows)
            found = _do(call, self._own, self._rows)
            answers = [self._lines.receive(other).decode() for other in range(self._others)]
            if isinstance(call, Move) and call.out and not any(answers):
                for part in self._remote:
                    part.receive(rows)
        except Exception as error:
            self.lost = f"blocks no longer reach all ranks: {reason(error)}"
            raise DeviceLost(self.lost) from error
        if wrong := next(filter(None, answers), ""):
            self.lost = f"a rank failed to move its part of a block: {wrong}"
            raise DeviceLost(self.lost)
        return found


def follow(line: RankChannel, own: Segments, rows: SharedRows) -> None:
    """Execute the calls of rank 0's DeviceRankPool, in a loop.

    Raises OSError or EOFError when rank 0 has ended."""
    while True:
        call: int | Move = pickle.loads(line.receive())  # noqa: S301 - from a rank of this node, over its own socket
        try:
            _do(call, own, rows)
            wrong = ""
        except Exception as error:
            wrong = reason(error)
        line.send(wrong.encode())


def _do(call: int | Move, own: Segments, rows: SharedRows) -> Sequence[int]:
    """Execute one call: a number grows the shared rows by that many, a Move copies this rank's part."""
    if isinstance(call, int):
        return rows.grow(call)
    own.move(call, rows)
    return ()


def _address(row: np.ndarray) -> int:
    return int(row.__array_interface__["data"][0])
