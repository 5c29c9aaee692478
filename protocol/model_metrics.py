"""Metrics with the label `model_name`: a router's metrics of one model, and a registry that adds the label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from kvferry.protocol import labels
from kvferry.protocol.token_histogram import TokenHistogram

Family = TypeVar("Family", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Router metrics bound to one model.

    prompt_tokens: by source."""

    ttft: TokenHistogram
    itl: TokenHistogram
    prompt_tokens: dict[str, Counter]
    output_tokens: Counter


def live_nodes(registry: CollectorRegistry) -> Gauge:
    """Define the gauge of live nodes by role, state and model, as a router sees them.

    The model of a node with another wire version is unknown, and its label empty."""
    text = "Live nodes by role, state and model (empty: nodes of another wire version)."
    return Gauge("kvferry_nodes", text, ["role", "state", *labels.MODEL], registry=registry)


class ModelRegistry(CollectorRegistry):
    """Metric registry of a process that serves one model.

    Every sample gets the label once `model_name` is set: the first name by which routers call the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model_name = ""
        self._families: dict[str, Any] = {}

    def family(self, kind: type[Family], name: str, help: str, names: Sequence[str], **more: Any) -> Family:
        """Return the metric of this name; create it on first use."""
        if name not in self._families:
            self._families[name] = kind(name, help, names, registry=self, **more)
        found = self._families[name]
        assert isinstance(found, kind), name
        return found

    def forget_gauges(self) -> None:
        """Remove all children of gauges, so that they are no longer reported."""
        for family in self._families.values():
            if isinstance(family, Gauge):
                family.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the model's label on each sample."""
        (label,) = labels.MODEL
        for family in super().collect():
            if self.model_name:
                family.samples = [
                    sample._replace(labels={**sample.labels, label: self.model_name}) for sample in family.samples
                ]
            yield family
