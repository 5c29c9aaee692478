"""What a node counts of the ships whose prompt it computed itself, too."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

LOOKS = ("agreed", "differed", "dropped")


class CanaryMetrics:
    """Beside the others of a node. looks: by outcome; deviations: to be bound to role and sender."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        looks = Counter(
            "kvferry_canary_looks",
            "Ships whose prompt was computed here, too, by outcome: agreed, differed, dropped (no room, or no time).",
            ["role", "outcome"],
            registry=registry,
        )
        self.looks = {outcome: looks.labels(role, outcome) for outcome in LOOKS}
        self.deviations = Counter(
            "kvferry_canary_deviations",
            "Those that differed, by the node that shipped them (empty: of no node).",
            ["role", "sender"],
            registry=registry,
        )
        self.deviations.labels(role, "")
        self.largest = Gauge(
            "kvferry_canary_largest_distance_ratio",
            "Largest distance between logits behind a ship and those computed here, as a share of their length.",
            ["role"],
            registry=registry,
        ).labels(role)
