"""Grants at a simulated decode node and their queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvferry.protocol.layout import blocks_for
from kvferry.simulate.machine import Machine
from kvferry.simulate.memory import Memory
from kvferry.simulate.scenario import Run

Granted = Callable[[int], None]
"""Told how many of the stream's blocks are here."""


class Grants:
    """held: of each that is granted, its blocks that hold nothing yet."""

    def __init__(self, machine: Machine) -> None:
        self.held: dict[Run, int] = {}
        self._machine = machine
        self._asking: deque[tuple[Run, Granted]] = deque()

    def __iter__(self) -> Iterator[Run]:
        """Who waits, and who is granted."""
        yield from (run for run, _ in self._asking)
        yield from self.held

    @property
    def asking(self) -> int:
        return len(self._asking)

    def ask(self, run: Run, granted: Granted) -> None:
        self._asking.append((run, granted))

    def drop(self, run: Run) -> None:
        """It does not wait any more."""
        self._asking = deque(each for each in self._asking if each[0] is not run)

    def seat(self, memory: Memory, streams: int) -> None:
        """Grant in turn what there is room for, beside so many streams."""
        size = self._machine.block_size
        while self._asking and streams + len(self.held) < self._machine.max_num_seqs:
            run, granted = self._asking[0]
            blocks = blocks_for(run.ask.prompt_len + run.ask.output_len, size)
            here = memory.take(run, run.ask.hashes[: run.length // size], blocks)
            if here is None:
                return
            self._asking.popleft()
            self.held[run] = blocks - here
            granted(here)
