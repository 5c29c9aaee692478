"""Rows of recurrent states: which rows of the states' tensor each running request has, and which rows are free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ROWS = 3
"""Rows of one request: the state so far, the row that the next step writes, and the state after its last full block."""


@dataclass(slots=True, eq=False)
class StateRows:
    """Rows of one running request.

    A step reads `before` and writes spare rows, one for each state that it keeps: the first one after its own tokens,
    the others after its drafts. Only `advance`, when the step is committed, makes such a row the state of the request.
    So a step that raises, is suspended or is abandoned can be computed again from the same state, and a state that saw
    a wrong draft is never used.

    pool          has all other rows
    spare         rows to write, in this order
    length        tokens that the state has seen
    before        row of the state after `length` tokens; -1: zeros, before the first token
    boundary      (tokens, row) of the state at the end of the last full block, while it is kept
    checkpointed  tokens up to which a checkpoint was made or loaded
    shared        tokens of the blocks that were found when the request was admitted: other prompts share them
    checkpoints   leading blocks, for each checkpoint that was made or loaded"""

    pool: StateRowPool
    spare: list[int]
    length: int = 0
    before: int = -1
    boundary: tuple[int, int] | None = None
    checkpointed: int = 0
    shared: int = 0
    checkpoints: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """Return all of its rows."""
        return [*self.spare, *self._kept()]

    def take_up_to(self, drafts: int) -> int:
        """Take rows for the states after so many drafts, until `settle`; return for how many drafts there are any."""
        self.spare += self.pool.take_up_to(1 + drafts - len(self.spare))
        return min(drafts, len(self.spare) - 1)

    def settle(self) -> None:
        """Return the rows that drafts needed, once the step is committed."""
        own = ROWS - len(self._kept())
        self.pool.release(self.spare[own:])
        del self.spare[own:]

    def advance(self, tokens: int, block_size: int) -> None:
        """Make the first spare row, which the last step wrote, the request's state, which has seen `tokens` more."""
        if tokens:
            self.load(self.length + tokens, block_size)

    def load(self, length: int, block_size: int) -> int:
        """Make the first spare row the request's state, which has seen `length` tokens, and return it."""
        kept = self._kept()
        self.before, self.length = self.spare.pop(0), length
        if length % block_size == 0:
            self.boundary = (length, self.before)
        self.spare += kept - self._kept()
        return self.before

    def _kept(self) -> set[int]:
        """Return the rows whose states are still needed."""
        return {self.before, -1 if self.boundary is None else self.boundary[1]} - {-1}


class StateRowPool:
    """Rows that no request has, and those lent to others. Owned by the engine thread. total: all rows."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))[::-1]
        self._lent = set[int]()

    @property
    def free(self) -> int:
        """Return the number of rows that nobody has."""
        return len(self._free)

    @property
    def used(self) -> float:
        """Return the share of rows that requests have. May be called from any thread."""
        return 1 - len(self._free) / self.total

    def take(self) -> StateRows | None:
        """Return rows for a request that begins with no state; None if too few are free."""
        return StateRows(self, self.take_up_to(ROWS)) if len(self._free) >= ROWS else None

    def take_up_to(self, count: int) -> list[int]:
        """Take up to `count` free rows."""
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def release(self, rows: Iterable[int]) -> None:
        """Take back rows whose states are not needed any more."""
        self._free += rows

    def lend(self, count: int) -> list[int]:
        """Take `count` free rows for something other than a request."""
        rows = self.take_up_to(count)
        assert len(rows) == count, "too few rows are free"
        self._lent.update(rows)
        return rows

    def take_back(self, rows: Iterable[int]) -> None:
        """Take back rows that were lent."""
        for row in rows:
            self._lent.remove(row)
            self._free.append(row)

    def check(self, taken: Iterable[StateRows]) -> None:
        """Assert that each row is free, lent or of one request."""
        seen = sorted([*self._free, *self._lent, *(row for each in taken for row in each.rows)])
        assert seen == list(range(self.total)), "rows of states are lost, or are of two requests"
