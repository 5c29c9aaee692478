"""Memory of recurrent states: the rows that steps read and write, and copies between rows and blocks of the pool."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._blocks = kv.view(torch.uint8).flatten(1)
        self._block_bytes = self._blocks.shape[1]
        self.num_blocks = blocks_of_state(rows.shape[1], self._block_bytes)

    @torch.inference_mode()
    def save(self, row: int, block_ids: Sequence[int]) -> None:
        """Copy a row's state into these blocks."""
        for block_id, piece in zip(block_ids, self._pieces(row), strict=True):
            self._blocks[block_id, : len(piece)].copy_(piece)
            self._blocks[block_id, len(piece) :].zero_()

    @torch.inference_mode()
    def load(self, block_ids: Sequence[int], row: int) -> None:
        """Copy the state in these blocks into a row."""
        for block_id, piece in zip(block_ids, self._pieces(row), strict=True):
            piece.copy_(self._blocks[block_id, : len(piece)])

    def _pieces(self, row: int) -> Sequence[torch.Tensor]:
        """Split the row's bytes into one piece per block."""
        return torch.split(self._rows[row], self._block_bytes)


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
