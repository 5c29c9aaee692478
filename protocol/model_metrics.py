"""Label `model_name` of router and worker metrics."""

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
    """Router metrics with the label `model_name`, bound to one model.

    prompt_tokens: by source."""

    ttft: Histogram
    itl: TokenHistogram
    prompt_tokens: dict[str, Counter]
    output_tokens: Counter


def live_nodes(registry: CollectorRegistry) -> Gauge:
    """Define the gauge of live nodes by role, state and model, as a router sees them.

    A node of another wire version has no model that could be told."""
    told = "Live nodes by role, state and model (without one: of another wire version)."
    return Gauge("kvferry_nodes", told, ["role", "state", *labels.MODEL], registry=registry)


class ModelRegistry(CollectorRegistry):
    """Metric registry of a process that serves one model; each sample names it once `model_name` is known.

    The label is the first name by which routers call it. As routers call it, its first name."""

    def __init__(self) -> None:
        super().__init__()
        self.model_name = ""
        self._families: dict[str, Any] = {}

    def family(self, kind: type[Family], name: str, help: str, names: Sequence[str], **more: Any) -> Family:
        """The metric of this name, made when it is first asked for."""
        if name not in self._families:
            self._families[name] = kind(name, help, names, registry=self, **more)
        found = self._families[name]
        assert isinstance(found, kind), name
        return found

    def forget_gauges(self) -> None:
        """Stop reporting the gauges that were bound."""
        for family in self._families.values():
            if isinstance(family, Gauge):
                family.clear()

    def collect(self) -> Iterator[Metric]:
        (label,) = labels.MODEL
        for family in super().collect():
            if self.model_name:
                family.samples = [
                    sample._replace(labels={**sample.labels, label: self.model_name}) for sample in family.samples
                ]
            yield family
