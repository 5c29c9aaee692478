"""Prompts: prompt queue of a simulated node, in the engine's fair-queuing order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvferry.simulate.trace_request import Run


@dataclass(slots=True, order=True)
class Prompt:
    """Prompt in a node's queue.

    place: sort key: prompts of interrupted streams first, then those due first. tokens, work: still to compute; an
    estimate until the prompt begins. start: tokens found in the pool. left: remaining work. spent_s: seconds spent on
    it."""

    place: tuple[bool, float, int]
    run: Run = field(compare=False)
    tokens: int = field(compare=False)
    done: Callable[[], None] = field(compare=False)
    work: float = field(compare=False, default=0.0)
    left: float = field(compare=False, default=0.0)
    start: int = field(compare=False, default=0)
    spent_s: float = field(compare=False, default=0.0)

    @property
    def tokens_left(self) -> int:
        """Return the tokens still to compute."""
        return int(self.tokens * self.left / self.work) if self.work else self.tokens


class Prompts:
    """Waiting and started prompts of a node.

    The order is fair queuing: `shared` grows by the tokens that each prompt would have had so far if all shared them
    equally."""

    def __init__(self) -> None:
        self.waiting: list[Prompt] = []
        self.begun: list[Prompt] = []
        self.shared = 0.0
        self._entered = 0
        self._queued = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.begun)

    @property
    def tokens(self) -> int:
        """Return the tokens still to compute, without those that were found in the pool on arrival."""
        return self._queued + sum(prompt.tokens_left for prompt in self.begun)

    def enter(self, run: Run, tokens: int, done: Callable[[], None]) -> None:
        """Queue a prompt with `tokens` tokens to compute."""
        self._entered += 1
        place = (not run.delivered, self.shared + tokens, self._entered)
        heappush(self.waiting, Prompt(place, run, tokens, done))
        self._queued += tokens

    def computed(self, tokens: float) -> None:
        """Count computed tokens."""
        self.shared += tokens / max(1, len(self))

    def drop(self, run: Run) -> None:
        """Remove a run's prompt."""
        self._queued -= sum(prompt.tokens for prompt in self.waiting if prompt.run is run)
        self.waiting = [prompt for prompt in self.waiting if prompt.run is not run]
        self.begun = [prompt for prompt in self.begun if prompt.run is not run]
        heapify(self.waiting)

    def next(self, begin: Callable[[Prompt], bool]) -> Prompt | None:
        """Return the prompt to compute now; `begin` tries to start a waiting one and returns whether it could."""
        while self.waiting:
            first = self.waiting[0]
            if self.begun and min(self.begun) < first:
                break
            expected = first.tokens
            if not begin(first):
                break
            heappop(self.waiting)
            self._queued -= expected
            self.begun.append(first)
        return min(self.begun) if self.begun else None
