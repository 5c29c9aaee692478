"""Grants: queue of grant requests at a simulated decode node, which get blocks and slots in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvferry.simulate.machine import Machine
from kvferry.simulate.memory import Memory
from kvferry.simulate.trace_request import Run

Granted = Callable[[int], None]
"""Callback of a grant, called with the number of the stream's blocks that are in the pool."""


class Grants:
    """Waiting grant requests and open grants of a node.

    held: per granted run, its reserved blocks without content."""

    def __init__(self, machine: Machine) -> None:
        self.held: dict[Run, int] = {}
        self._machine = machine
        self._waiting_runs: deque[tuple[Run, Granted]] = deque()

    def __iter__(self) -> Iterator[Run]:
        """Iterate over runs that wait, then those that are granted."""
        yield from (run for run, _ in self._waiting_runs)
        yield from self.held

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting_runs)

    def ask(self, run: Run, granted: Granted) -> None:
        """Queue a run for a grant."""
        self._waiting_runs.append((run, granted))

    def drop(self, run: Run) -> None:
        """Remove a run from the queue."""
        self._waiting_runs = deque(each for each in self._waiting_runs if each[0] is not run)

    def grant_waiting(self, memory: Memory, streams: int) -> None:
        """Grant requests in order while blocks and slots last, beside `streams` streams."""
        size = self._machine.block_size
        while self._waiting_runs and streams + len(self.held) < self._machine.max_num_seqs:
            run, granted = self._waiting_runs[0]
            blocks = self._machine.blocks_for(run.ask.prompt_len + run.ask.output_len)
            here = memory.take(run, run.ask.hashes[: run.length // size], blocks, cache_use=run.ask.cache_use)
            if here is None:
                return
            self._waiting_runs.popleft()
            self.held[run] = blocks - here
            granted(here)
