"""Metrics of an adapter about the engine beside it."""

from __future__ import annotations

from prometheus_client import Gauge

from kvferry.protocol.model_metrics import ModelRegistry


class AdapterMetrics:
    """Gauges of the mirror of an engine's cache; all are totals since the adapter's start, unless stated."""

    def __init__(self, registry: ModelRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return registry.family(Gauge, name, help, [])

        self.predicted = gauge(
            "kvferry_mirror_predicted_tokens", "Prompt tokens that the mirror of the engine's cache held."
        )
        self.actual = gauge(
            "kvferry_mirror_actual_tokens", "Prompt tokens that the engine reused, of the same prompts."
        )
        self.difference = gauge(
            "kvferry_mirror_difference_tokens", "Sum of the absolute differences between the two, prompt by prompt."
        )
        self.blocks = gauge("kvferry_mirror_blocks", "Blocks that the engine is known to cache now.")
        self.gaps = gauge("kvferry_mirror_gaps", "Times that published KV events were missing.")
        self.resets = gauge("kvferry_mirror_resets", "Times that the mirror was emptied because events were lost.")
