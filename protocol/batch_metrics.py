"""Router metrics of clients' batches: running, continued, and rows by result."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Metrics of the batches that one router runs."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        r = registry or CollectorRegistry()
        self.running = Gauge("kvferry_batches_running", "Batches that this router runs.", registry=r)
        self.resumed = Counter(
            "kvferry_batches_resumed",
            "Batches that this router continued: after a restart, a failure of the store, or another router's end.",
            registry=r,
        )
        self.rows = Counter(
            "kvferry_batch_rows", "Rows of batches answered, by result: ok, failed.", ["result"], registry=r
        )
        for result in ("ok", "failed"):
            self.rows.labels(result)
