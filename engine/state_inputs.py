"""StateInputs: the rows of recurrent states that a step reads and writes, as inputs of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.engine.step_slices import Slice
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.sequence_state import SequenceStates


class StateInputs:
    """Inputs of a runner's steps. rows: float32 [rows, floats]; staging: to the model, for these inputs alone."""

    def __init__(self, rows: torch.Tensor, staging: Staging) -> None:
        self._rows, self._staging = rows, staging

    def of(self, slices: Sequence[Slice]) -> SequenceStates:
        """Return the rows of the slices' requests, a draft's after those of the token before it.

        Slices of one request that follow each other are computed one after the other.

        They are valid until the next call."""
        before, after = list[int](), list[int]()
        request, used = None, 0
        for part in slices:
            rows, count = part.request.state_rows, 1 + len(part.drafts)
            assert rows is not None, f"{part.request.key} has no rows for its state"
            request, used = part.request, used if part.request is request else 0
            chain = (rows.before, *rows.spare[: used + count])
            before += chain[used:-1]
            after += chain[used + 1 :]
            used += count
        return self.between(before, after)

    def between(self, before: Sequence[int], after: Sequence[int]) -> SequenceStates:
        """Return the rows that sequences read and write; -1: none. They are valid until the next call of either."""
        return SequenceStates(self._rows, *self._staging.put(list(np.array((before, after), dtype=np.int64))))
