"""History: samples the router's counters every five seconds for ten minutes, for the dashboard."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Sums
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client import Counter, Gauge, Histogram

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.token_histogram import TokenHistograms
from kvferry.router.dashboard.state import Counts
from kvferry.runtime.background import background

INTERVAL_S, READINGS = 5.0, 121
"""Interval of readings in seconds, and number of readings kept (ten minutes)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of all counters shown over time, since the router's start."""

    at: float
    statuses: Sums[str]
    prompt: Sums[str]
    missed: Sums[str]
    predicted: int
    output: int
    first_tokens: int
    first_token_s: float
    later_tokens: int = 0
    between_s: float = 0.0
    refused: Sums[str] = field(default_factory=Sums)
    retries: Sums[str] = field(default_factory=Sums)

    def since(self, before: Reading | None, now: float, began: float) -> Counts:
        """Return the counts after `before`, or since `began`."""
        old = before or Reading(began, Sums(), Sums(), Sums(), 0, 0, 0, 0.0)
        statuses = self.statuses - old.statuses
        firsts, later = self.first_tokens - old.first_tokens, self.later_tokens - old.later_tokens
        return Counts(
            ago_s=now - self.at,
            seconds=self.at - old.at,
            requests=statuses.total(),
            failed=sum(count for status, count in statuses.items() if status >= "500"),
            prompt={source: self.prompt[source] - old.prompt[source] for source in self.prompt},
            predicted=self.predicted - old.predicted,
            missed={reason: self.missed[reason] - old.missed[reason] for reason in self.missed},
            output=self.output - old.output,
            first_tokens=firsts,
            first_token_s=(self.first_token_s - old.first_token_s) / firsts if firsts else None,
            later_tokens=later,
            itl_s=(self.between_s - old.between_s) / later if later else None,
            refused=dict(self.refused - old.refused),
            retries=dict(self.retries - old.retries),
        )


class History:
    """History of one router's metrics."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._began = clock()
        self._readings: deque[Reading] = deque(maxlen=READINGS)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Take readings until the end of the block."""
        return background(self._run(), "history")

    async def _run(self) -> None:
        while True:
            self.take_reading()
            await asyncio.sleep(INTERVAL_S)

    def take_reading(self) -> None:
        """Take a reading."""
        self._readings.append(self._read())

    def growth(self) -> tuple[list[Counts], Counts]:
        """Return the counts between consecutive readings up to now, and the counts since the router's start."""
        now = self._read()
        points = [after.since(before, now.at, self._began) for before, after in pairwise([*self._readings, now])]
        return points, now.since(None, now.at, self._began)

    def _read(self) -> Reading:
        m = self._metrics
        return Reading(
            self._clock(),
            sums(m.requests, "status"),
            sums(m.prompt_tokens, "source"),
            sums(m.reuse.misses, "reason"),
            int(total(m.reuse.predicted)),
            int(total(m.output_tokens)),
            int(total(m.ttft, "_count")),
            total(m.ttft, "_sum"),
            int(total(m.itl, "_count")),
            total(m.itl, "_sum"),
            sums(m.errors, "status", "code"),
            sums(m.retries, "step"),
        )


def sums(metric: Counter, *labels: str) -> Sums[str]:
    """Sum a metric by these labels over all other labels, zeros included."""
    found: Sums[str] = Sums()
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[" ".join(sample.labels[label] for label in labels)] += int(sample.value)
    return found


def total(metric: Counter | Gauge | Histogram | TokenHistograms, ending: str = "_total") -> float:
    """Sum a metric over all labels, from the samples whose name has this ending."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith(ending))
