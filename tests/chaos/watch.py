"""What grows: memory, descriptors and threads of each process, sampled while it is under load; and how late the
clients' own loop is, who otherwise see pauses that nobody made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from tests.chaos.plan import ROUTERS
from tests.chaos.stage import Stage

EVERY_S = 5.0
TICK_S = 0.05
LATE_S = 0.1
ENOUGH = 60
"""Fewer samples of one process tell nothing."""
ROOM = {"rss_mib": 64, "fds": 16, "threads": 4}
"""What a process may grow between the first half and the last quarter of its life without being suspected."""


Late = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process, which its id tells from those before it."""

    at: float
    name: str
    pid: int
    values: dict[str, int]


class Watch:
    """`samples`, and when the clients' loop was late: (since when, until when), in order; all as of now."""

    def __init__(self, stage: Stage) -> None:
        self.samples: list[Sample] = []
        self.late: list[Late] = []
        self._stage = stage

    async def run(self) -> None:
        """Until it is cancelled."""
        sampled = 0.0
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - due > LATE_S:
                self.late.append((due, now))
            if now - sampled >= EVERY_S:
                sampled = now
                self._sample(now)

    def _sample(self, now: float) -> None:
        for name in (*self._stage.roster.nodes, *ROUTERS, "valkey"):
            pid = self._stage.pid(name)
            try:
                process = psutil.Process(pid) if pid else None
                if process is not None:
                    rss = process.memory_info().rss >> 20
                    values = {"rss_mib": rss, "fds": process.num_fds(), "threads": process.num_threads()}
                    self.samples.append(Sample(now, name, process.pid, values))
            except psutil.Error:
                continue


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, list[int]]]:
    """By process: the most of each value in the first half of its samples, since clients come and go, and the median in
    the last quarter; of the process that lived longest under a name."""
    found: dict[str, dict[str, list[int]]] = {}
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.pid), []).append(sample)
    for (name, _), life in sorted(lives.items(), key=lambda each: len(each[1])):
        if len(life) >= ENOUGH:
            before, behind = life[: len(life) // 2], life[-(len(life) // 4) :]
            found[name] = {
                key: [max(s.values[key] for s in before), int(median(s.values[key] for s in behind))]
                for key in life[0].values
            }
    return found


def suspects(grown: dict[str, dict[str, list[int]]], streams: int) -> list[str]:
    """What grew by more than its room. All streams may have come over to a router since, with two descriptors each."""
    return [
        f"{name} {key} {first} → {last}"
        for name, values in grown.items()
        for key, (first, last) in values.items()
        if last - first > ROOM[key] + (2 * streams if key == "fds" and name in ROUTERS else 0)
    ]
