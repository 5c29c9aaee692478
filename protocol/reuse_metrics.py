"""Router metrics of prefix reuse: predicted and actual tokens, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from kvferry.protocol import labels


class ReuseMetrics:
    """Prompt tokens by reuse and model.

    In sum, predicted + unpredicted = actual + missed. The equation holds for every request, so surplus reuse of one
    never hides a miss of another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *more: str) -> Counter:
            return Counter(name, help, [*labels.MODEL, *more], registry=registry)

        self.predicted = counter("kvferry_predicted_reuse_tokens", "Prompt tokens expected to be reused, by model.")
        self.actual = counter("kvferry_actual_reuse_tokens", "Prompt tokens that were reused, by model.")
        self.unpredicted = counter(
            "kvferry_unpredicted_reuse_tokens",
            "Prompt tokens reused beyond what was expected, by model.",
        )
        self.misses = counter(
            "kvferry_reuse_miss_tokens",
            f"Prompt tokens expected but not reused, by model and reason: {', '.join(labels.MISS_REASONS)}.",
            "reason",
        )

    def of(self, model: str) -> ModelReuse:
        """Return the metrics of one model."""
        misses = {reason: self.misses.labels(model, reason) for reason in labels.MISS_REASONS}
        return ModelReuse(
            self.predicted.labels(model), self.actual.labels(model), self.unpredicted.labels(model), misses
        )


@dataclass(frozen=True, slots=True)
class ModelReuse:
    """Reuse metrics of one model.

    misses: by reason."""

    predicted: Counter
    actual: Counter
    unpredicted: Counter
    misses: Mapping[str, Counter]

    def count(self, predicted: int, actual: int, missed: Mapping[str, int]) -> None:
        """Count one request's reuse."""
        if predicted:
            self.predicted.inc(predicted)
        if actual:
            self.actual.inc(actual)
        if actual > predicted:
            self.unpredicted.inc(actual - predicted)
        for reason, tokens in missed.items():
            self.misses[reason].inc(tokens)
