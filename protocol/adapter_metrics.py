"""Metrics of an adapter: its engine's state, guarantees and transfers, and the mirror of the engine's cache."""

from __future__ import annotations

from prometheus_client import Gauge

from kvferry.protocol.lease import GUARANTEES
from kvferry.protocol.model_metrics import ModelRegistry

CONTINUED_WAYS = ("resumed", "replayed")
"""Ways in which an engine continues a stream of another node: after its tokens, or from the prompt again."""


class AdapterMetrics:
    """Gauges of an engine, its transfers and the mirror of its cache: totals since the adapter's start, unless stated.

    Gauges with a label are dicts by its values. All exist from the start, at zero."""

    def __init__(self, registry: ModelRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return registry.family(Gauge, name, help, [])

        def gauges(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Gauge]:
            metric = registry.family(Gauge, name, help, [label])
            return {value: metric.labels(value) for value in known}

        self.engine_up = gauge(
            "kvferry_engine_up", "1 while the engine answers; 0 before it is ready, and while it hangs or is gone."
        )
        self.epoch = registry.family(
            Gauge,
            "kvferry_engine_epoch",
            "Epoch of the node, by kind and version of its engine: another one for each start. Absent until then.",
            ["engine"],
        )
        self.guarantees = gauges(
            "kvferry_engine_guarantee",
            "1 if the engine keeps it now, as measured when it joined or accepted by the operator, else 0.",
            "guarantee",
            GUARANTEES,
        )
        self.continued = gauges(
            "kvferry_engine_continued_streams",
            "Streams of other nodes that continued here, by way: resumed after their tokens, replayed from the prompt.",
            "way",
            CONTINUED_WAYS,
        )
        self.swallowed = gauge(
            "kvferry_engine_swallowed_tokens", "Delivered tokens of replayed streams, which the engine computes again."
        )
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
        self.repeated = gauge(
            "kvferry_mirror_repeated_batches", "Batches of KV events that the engine repeated on request."
        )
        self.resets = gauge("kvferry_mirror_resets", "Times that the mirror was emptied because events were lost.")
