"""Metrics of an adapter about the engine beside it."""

from __future__ import annotations

from prometheus_client import Gauge

from kvferry.protocol.model_metrics import ModelRegistry


class AdapterMetrics:
    """Gauges of an engine's cache and transfers; all are totals since the adapter's start, unless stated."""

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
        self.pinned_blocks = gauge(
            "kvferry_transfer_pinned_blocks",
            "Blocks that the engine keeps until decode engines have fetched them.",
        )
        self.pinned_prompts = gauge("kvferry_transfer_pinned_prompts", "Prompts of these blocks.")
        self.refused = gauge(
            "kvferry_transfer_refused", "Handovers of prompts that were refused, such as old or repeated ones."
        )
        self.resets = gauge("kvferry_mirror_resets", "Times that the mirror was emptied because events were lost.")
