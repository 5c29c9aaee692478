"""Prompt steps that are suspended between two layers for more urgent work, and resumed there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from math import inf

from kvferry.engine import fault_isolation
from kvferry.engine.cancellations import Cancellations
from kvferry.engine.fault_isolation import Drawn
from kvferry.engine.inflight_step import InflightStep
from kvferry.engine.models.base import ForwardAbandoned, SuspendedPass
from kvferry.engine.request import Place
from kvferry.engine.request_states import State
from kvferry.engine.runner import StepRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.step_slices import Slice

DEEPEST = 4
"""Maximum number of steps suspended at once; a further step runs to its end."""
MIN_S = 0.005
"""Seconds for which a step computes before it may be suspended; the next round takes tenths of a millisecond."""


@dataclass(slots=True, eq=False)
class Batch:
    """Work of one step: slices, decodes first.

    halfway: where a suspended step resumes; flight: the launched step; chains: the blocks that it writes to, by slice;
    seconds: its duration so far."""

    slices: Sequence[Slice]
    halfway: SuspendedPass | None = None
    flight: InflightStep | None = None
    seconds: float = 0.0
    chains: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.chains = [part.request.block_ids for part in self.slices]

    @property
    def place(self) -> Place:
        """Return the queue place of its first request."""
        return min(part.request.place for part in self.slices)

    def left(self) -> bool:
        """Keep only slices whose requests still wait for them in the same blocks; return whether any are left."""
        kept = [
            i for i, (part, blocks) in enumerate(zip(self.slices, self.chains, strict=True)) if _waits(part, blocks)
        ]
        if len(kept) < len(self.slices):
            ends = list(pairwise(accumulate((part.count for part in self.slices), initial=0)))
            if self.halfway is not None:
                self.halfway = self.halfway.of(list(chain.from_iterable(range(*ends[i]) for i in kept)))
            if self.flight is not None:
                self.flight = self.flight.of(kept)
            self.slices = [self.slices[i] for i in kept]
            self.chains = [self.chains[i] for i in kept]
        return bool(kept)


def _waits(part: Slice, blocks: list[int]) -> bool:
    """Return whether the slice's request still waits; one that lost its blocks has another list of them, or none."""
    request = part.request
    return request.state is State.RUNNING and request.computed_len == part.start and request.block_ids is blocks


class SuspendedStep:
    """Suspended steps of one engine; the last one resumes first.

    called: returns whether the engine has commands, which may bring urgent work."""

    def __init__(self, scheduler: Scheduler, cancellations: Cancellations) -> None:
        self.called: Callable[[], bool] = lambda: False
        self._scheduler, self._cancellations = scheduler, cancellations
        self._batches: list[Batch] = []

    def __bool__(self) -> bool:
        return bool(self._batches)

    def run(self, runner: StepRunner, batch: Batch) -> Sequence[Drawn] | None:
        """Run the batch and return what was drawn for each slice, or None if it ended early or is suspended.

        An early end means that all its requests are leaving; it is not committed, and its writes lie after the
        computed tokens. Raises DeviceLost."""
        keys = [part.request.key for part in batch.slices]
        rests_at = time.monotonic() + MIN_S if self._may_put(runner, batch) else inf

        def keep_going() -> bool:
            called = time.monotonic() > rests_at and self.called()
            return not (called or self._cancellations.includes(keys))

        try:
            return fault_isolation.run(runner, batch.slices, keep_going, batch.halfway)
        except ForwardAbandoned as given_up:
            if given_up.halfway is not None:
                batch.halfway = given_up.halfway
                self._batches.append(batch)
            return None

    def next(self, extend: Callable[[Sequence[Slice]], Sequence[Slice]]) -> Batch:
        """Return the batch to compute now: urgent work, or the last suspended batch.

        extend: adds drafts."""
        while self._batches:
            last = self._batches[-1]
            if last.left() and (slices := self._scheduler.schedule(last.place)):
                return Batch(extend(slices))
            self._batches.pop()
            if last.left():
                return last
        return Batch(extend(self._scheduler.schedule()))

    def _may_put(self, runner: StepRunner, batch: Batch) -> bool:
        """Return whether the batch may be suspended; one with streams never is."""
        return runner.model.resumable and not batch.slices[0].decodes and len(self._batches) < DEEPEST
