"""Metrics of canary checks on a decode node."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvferry.protocol.model_metrics import ModelRegistry

LOOKS = ("agreed", "differed", "dropped")


class CanaryMetrics:
    """Canary metrics of a worker.

    looks: counters by outcome. deviations: a family to be bound to role and sender."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        looks = registry.family(
            Counter,
            "kvferry_canary_looks",
            "Ships whose prompt was computed here, too, by outcome: agreed, differed, dropped (no room, or no time).",
            ["role", "outcome"],
        )
        self.looks = {outcome: looks.labels(role, outcome) for outcome in LOOKS}
        self.deviations = registry.family(
            Counter,
            "kvferry_canary_deviations",
            "Those that differed, by the node that shipped them (empty: of no node).",
            ["role", "sender"],
        )
        self.deviations.labels(role, "")
        self.largest = registry.family(
            Gauge,
            "kvferry_canary_largest_distance_ratio",
            "Largest distance between logits behind a ship and those computed here, as a share of their length.",
            ["role"],
        ).labels(role)
