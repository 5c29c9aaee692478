"""Log lines and metrics of canary checks on a decode node."""

from __future__ import annotations

import logging

from kvferry.engine.events import CanaryChecked
from kvferry.protocol.worker_metrics import WorkerMetrics

log = logging.getLogger("kvferry.worker")


class CanaryLog:
    """Logs and counts the results of canary checks."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._largest = 0.0

    def differs(self, event: CanaryChecked) -> bool:
        """Count a result; return whether the shipped blocks differ from what this node computes.

        Routers must hear of a difference."""
        self._metrics.canary.looks[event.outcome].inc()
        if event.outcome == "dropped":
            return False
        self._largest = max(self._largest, event.distance)
        self._metrics.canary.largest.set(self._largest)
        if event.outcome == "agreed":
            return False
        self._metrics.canary.deviations.labels(self._metrics.role, event.sender[0]).inc()
        log.warning(
            "blocks that %s sent of %s (%d tokens) differ from what this node computes: distance of logits "
            "%.3g, limit %.3g",
            event.sender[0], event.key[0], event.tokens, event.distance, event.tolerated,
        )  # fmt: skip
        return True
