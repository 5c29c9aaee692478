"""StateMemory: rows of recurrent states that steps read and write, and copies between rows and blocks of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvferry.runtime.huge_pages import map_zeros

STATE_DTYPE = torch.float32
"""Number format of recurrent states, whatever the model's."""


class StateMemory:
    """Rows of recurrent states on the model's device.

    rows: float32 [rows, floats]. kv: the block pool [block, ...], whose blocks are contiguous; a state takes
    `num_blocks` of them, with the last block zero-padded. A copy runs after the last step's writes and before the next
    step's."""

    def __init__(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        self.rows = rows
        self._rows = rows.view(torch.uint8)
        self._blocks = kv.view(torch.uint8).flatten()
        self._block_bytes = len(self._blocks) // len(kv)
        self.num_blocks = blocks_of_state(rows.shape[1], self._block_bytes)

    @torch.inference_mode()
    def save(self, row: int, block_ids: Sequence[int]) -> None:
        """Copy a row's state into these blocks."""
        for blocks, piece in self._runs(block_ids, row):
            blocks[: len(piece)].copy_(piece)
            blocks[len(piece) :].zero_()

    @torch.inference_mode()
    def load(self, block_ids: Sequence[int], row: int) -> None:
        """Copy the state in these blocks into a row."""
        for blocks, piece in self._runs(block_ids, row):
            piece.copy_(blocks[: len(piece)])

    def _runs(self, block_ids: Sequence[int], row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each run of neighbouring blocks, and those of the row that they hold."""
        assert len(block_ids) == self.num_blocks
        size, begin = self._block_bytes, 0
        for end in range(1, len(block_ids) + 1):
            if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
                blocks = self._blocks[block_ids[begin] * size : (block_ids[end - 1] + 1) * size]
                yield blocks, self._rows[row, begin * size : end * size]
                begin = end


def blocks_of_state(floats: int, block_bytes: int) -> int:
    """Return how many blocks hold a state of `floats` numbers; 0 for a model without recurrent layers."""
    return -(-floats * STATE_DTYPE.itemsize // block_bytes)


def make_rows(rows: int, floats: int, device: torch.device) -> torch.Tensor:
    """Allocate rows of states as zeros, float32 [rows, floats].

    On a CPU a page takes memory only once it is first written. Raises OSError, OverflowError or RuntimeError."""
    if device.type == "cpu":
        pages = map_zeros(rows * floats * STATE_DTYPE.itemsize)
        return torch.frombuffer(pages, dtype=STATE_DTYPE).view(rows, floats)
    return torch.zeros(rows, floats, dtype=STATE_DTYPE, device=device)
