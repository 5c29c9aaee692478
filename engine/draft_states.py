"""DraftStates: rows of a draft model's recurrent states, with the state after each token that it drew for a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.engine.state_rows import StateRowPool, StateRows


@dataclass(slots=True, eq=False)
class DraftRows(StateRows):
    """Rows of a draft model's request. kept: the row of the state after so many tokens, since the last `rewind`.

    The stream may refuse drafts from any place on, so the state after each of them is kept until it is known."""

    kept: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Return all of its rows."""
        return [*self.spare, *self.kept.values()]

    def rewind(self, length: int) -> int:
        """Go back to the last state that is kept of at most `length` tokens, or to the beginning; return its tokens."""
        length = max((each for each in self.kept if each <= length), default=0)
        row = self.kept.pop(length, -1)
        self.free()
        self.before, self.length = row, length
        if row >= 0:
            self.kept[length] = row
        return self.length

    def reserve(self, count: int) -> bool:
        """Take rows for `count` more states; False if too few are free."""
        self.spare += self.pool.take_up_to(count - len(self.spare))
        return len(self.spare) >= count

    def record(self, tokens: int) -> None:
        """Record that a step computed `tokens` more and wrote the state after them to the first spare row."""
        self.before, self.length = self.spare.pop(0), self.length + tokens
        self.kept[self.length] = self.before

    def free(self) -> None:
        """Return all rows to the pool."""
        self.pool.release(self.rows)
        self.spare, self.kept, self.before, self.length = [], {}, -1, 0


class DraftStates:
    """States of a draft model with recurrent layers. rows: of its runner's states."""

    def __init__(self, rows: int) -> None:
        self._pool = StateRowPool(rows)

    def check(self, taken: Iterable[DraftRows]) -> None:
        """Assert that each row is free or of one request."""
        self._pool.check(taken)

    def open(self) -> DraftRows:
        """Return the rows of a request, none so far."""
        return DraftRows(self._pool, [])
