"""Recurrent state of sequences: StateLayout, its parts over all layers, and SequenceStates, a batch's rows of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Parts of one sequence's recurrent state over all layers, one after another in a row of float32 numbers.

    shapes: of the parts, in order, such as a convolution's window [channels, width - 1] or a head's matrix."""

    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def floats(self) -> int:
        """Return the numbers of a row; 0 for a model without recurrent layers."""
        return sum(math.prod(shape) for shape in self.shapes)

    def begin(self, part: int) -> int:
        """Return the numbers of a row before the part."""
        return sum(math.prod(shape) for shape in self.shapes[:part])

    def view(self, rows: torch.Tensor, part: int) -> torch.Tensor:
        """Return the part's view [rows, *shape] of `rows` [rows, floats], sharing its memory."""
        begin = self.begin(part)
        return rows[:, begin : begin + math.prod(self.shapes[part])].view(len(rows), *self.shapes[part])


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """States of a batch's sequences, in the order of the batch plan.

    rows: float32 [rows, floats], which steps share. before: int64 [num_seqs], the row that holds a sequence's state
    before its first query token; -1: the sequence starts here, with zeros. after: int64 [num_seqs], the row for its
    state after its last query token; -1: nobody needs it. No row is written that the batch reads or writes otherwise,
    except in a batch that is `chained`: there a sequence may begin with the state that the one before it wrote."""

    rows: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
