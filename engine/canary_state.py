"""Recurrent state of a canary check: rows in which it is recomputed, beside the state that a transfer brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine import output_tolerance
from kvferry.engine.state_memory import StateMemory
from kvferry.engine.state_rows import ROWS, StateRowPool

CHECK_ROWS = 2
"""Rows of a check: the state so far and the row that the next piece writes."""


class CanaryStates:
    """Rows of one engine's states for its canary checks.

    parts: sizes of a state's parts, in order (`ModelInfo.state_parts`). Owned by the engine thread."""

    def __init__(self, rows: StateRowPool, memory: StateMemory, parts: Sequence[int]) -> None:
        self._rows, self._memory, self._parts = rows, memory, list(parts)

    def open(self, received: Sequence[int], requests: int) -> CheckedState | None:
        """Return the state of a new check; None if its rows would leave none for so many further requests.

        received: blocks of the transferred state."""
        if not self.enough_for(requests, CHECK_ROWS):
            return None
        return CheckedState(self._memory, self._parts, list(received), self._rows.lend(CHECK_ROWS))

    def enough_for(self, requests: int, beside: int = 0) -> bool:
        """Return whether so many further requests can have rows, and `beside` others."""
        return self._rows.free >= ROWS * requests + beside

    def close(self, state: CheckedState) -> None:
        """Take back the rows of a check."""
        self._rows.take_back(state.rows)


@dataclass(slots=True, eq=False)
class CheckedState:
    """State of one check.

    received: blocks of the transferred state. rows: the state after the recomputed tokens, if any were, and the row
    that the next piece writes. A piece that is abandoned leaves the first one as it is."""

    memory: StateMemory
    parts: list[int]
    received: list[int]
    rows: list[int]
    begun: bool = False

    @property
    def step(self) -> tuple[int, int]:
        """Return the rows that the next piece reads and writes."""
        return self.rows[0] if self.begun else -1, self.rows[1]

    def advance(self) -> None:
        """Record that a piece was computed."""
        self.rows.reverse()
        self.begun = True

    def compare(self) -> float:
        """Load the received state and return its distance from the recomputed one."""
        self.memory.load(self.received, self.rows[1])
        own, theirs = self.memory.rows[self.rows].cpu()
        return output_tolerance.of_states(own.split(self.parts), theirs.split(self.parts))

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows to read and write for the last token: after the own state, and after the received one."""
        return (self.rows[0], -1), (self.rows[1], -1)
