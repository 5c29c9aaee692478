"""Metrics of canary checks, in which a decode node recomputes received prompts and compares the logits."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvferry.protocol.model_metrics import ModelRegistry

OUTCOMES = ("agreed", "differed", "dropped")


class CanaryMetrics:
    """Canary metrics of a worker.

    checks: counters by outcome. deviations: a family to be bound to role and sender."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        checks = registry.family(
            Counter,
            "kvferry_canary_looks",
            "Canary recomputations of received prompts, by outcome: agreed, differed, dropped (no room, or no time).",
            ["role", "outcome"],
        )
        self.checks = {outcome: checks.labels(role, outcome) for outcome in OUTCOMES}
        self.deviations = registry.family(
            Counter,
            "kvferry_canary_deviations",
            "Canary recomputations that differed, by the node that sent the prompt's blocks (empty: unknown).",
            ["role", "sender"],
        )
        self.deviations.labels(role, "")
        self.largest = registry.family(
            Gauge,
            "kvferry_canary_largest_distance_ratio",
            "Largest distance between the logits after a received prompt and those computed here, relative to "
            "their norm.",
            ["role"],
        ).labels(role)
