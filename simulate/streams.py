"""Streams: decode batch of a simulated node, advanced in equal steps until the batch changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from kvferry.simulate.trace_request import Run

NEAR = 1e-6
"""Tolerance in steps for rounding errors."""


class Streams:
    """Streams of a decode batch.

    steps: steps done so far, possibly fractional. context: total tokens of all streams."""

    def __init__(self) -> None:
        self.steps = self.context = 0.0
        self._ends: list[tuple[float, int, Run, Callable[[], None]]] = []
        self._joined = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, run: Run) -> bool:
        return any(each[2] is run for each in self._ends)

    def join(self, run: Run, tokens: int, done: Callable[[], None]) -> None:
        """Add a stream that ends in `tokens` steps."""
        self._joined += 1
        heappush(self._ends, (self.steps + tokens, self._joined, run, done))
        self.context += run.length

    def drop(self, run: Run) -> None:
        """End a run's stream, if it has one here, with the tokens that it has."""
        for each in [each for each in self._ends if each[2] is run]:
            self._ends.remove(each)
            self._deliver(each[0], run)
            self.context -= run.length
        heapify(self._ends)

    def advance(self, steps: float) -> None:
        """Advance all streams by `steps` steps."""
        self.steps += steps
        self.context += steps * len(self._ends)

    @property
    def next_end(self) -> float:
        """Return the steps until the first stream ends; there must be one."""
        return self._ends[0][0] - self.steps

    def ended(self) -> Iterator[Callable[[], None]]:
        """Remove streams that have all their tokens, and yield their callbacks."""
        while self._ends and self._ends[0][0] <= self.steps + NEAR:
            _, _, run, done = heappop(self._ends)
            self.context = max(0.0, self.context - run.ask.prompt_len - run.ask.output_len) if self._ends else 0.0
            yield done

    def break_off(self) -> list[Run]:
        """End all streams with the tokens that they have, and return their runs."""
        for end, _, run, _ in self._ends:
            self._deliver(end, run)
        here = [each[2] for each in self._ends]
        self._ends, self.context = [], 0.0
        return here

    def _deliver(self, end: float, run: Run) -> None:
        """Count the tokens of a stream that would end when `steps` reaches `end`."""
        run.delivered = run.ask.output_len - math.ceil(end - self.steps - NEAR)
