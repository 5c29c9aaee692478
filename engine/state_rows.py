"""Rows of recurrent states: which rows of the states' tensor each running request has, and which rows are free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ROWS = 3
"""Rows of one request: the state so far, the row that the next step writes, and the state after its last full block."""


@dataclass(slots=True, eq=False)
class StateRows:
    """Rows of one running request.

    A step reads `before` and writes `after`; only `advance`, when the step is committed, makes `after` the state of the
    request. So a step that raises, is suspended or is abandoned can be computed again from the same state.

    rows          its rows of the tensor
    length        tokens that the state has seen
    before        row of the state after `length` tokens; -1: zeros, before the first token
    after         row that the next step writes
    boundary      (tokens, row) of the state at the end of the last full block, while it is kept
    checkpointed  tokens up to which a checkpoint was made or loaded
    shared        tokens of the blocks that were found when the request was admitted: other prompts share them
    checkpoints   leading blocks, for each checkpoint that was made or loaded"""

    rows: tuple[int, ...]
    length: int = 0
    before: int = -1
    boundary: tuple[int, int] | None = None
    checkpointed: int = 0
    shared: int = 0
    checkpoints: list[int] = field(default_factory=list)

    @property
    def after(self) -> int:
        """Return the row that the next step writes."""
        used = (self.before, self.boundary[1] if self.boundary is not None else -1)
        return next(row for row in self.rows if row not in used)

    def advance(self, tokens: int, block_size: int) -> None:
        """Make the row that the last step wrote the request's state, which has now seen `tokens` more."""
        if tokens:
            self.before = self.after
            self.length += tokens
            self._note(block_size)

    def load(self, length: int, block_size: int) -> int:
        """Return the row to fill with a state that has seen `length` tokens; it is the request's from now on."""
        self.before, self.length = self.after, length
        self._note(block_size)
        return self.before

    def _note(self, block_size: int) -> None:
        if self.length % block_size == 0:
            self.boundary = (self.length, self.before)


class StateRowPool:
    """Rows that no request has. Owned by the engine thread. requests: how many requests can have rows at once."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self._free = [tuple(range(first, first + ROWS)) for first in range(0, requests * ROWS, ROWS)][::-1]

    def __len__(self) -> int:
        """Return how many more requests can have rows."""
        return len(self._free)

    @property
    def used(self) -> float:
        """Return the share of rows that requests have. May be called from any thread."""
        return 1 - len(self._free) / self.requests

    def take(self) -> StateRows | None:
        """Return rows for a request that begins with no state; None if all are taken."""
        return StateRows(self._free.pop()) if self._free else None

    def give_back(self, rows: StateRows) -> None:
        """Take back the rows of a request that ended or lost its blocks."""
        self._free.append(rows.rows)

    def check(self, taken: Iterable[StateRows]) -> None:
        """Assert that each row is free or of one request."""
        seen = sorted(row for rows in (*self._free, *(each.rows for each in taken)) for row in rows)
        assert seen == list(range(self.requests * ROWS)), "rows of states are lost, or are of two requests"
