"""What a node counts of the blocks that it keeps in a slower memory."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from protocol.labels import TIER_OUTCOMES, TIER_WAYS


class TierMetrics:
    """Beside the others of a node. reads: by outcome; blocks: by way; seconds: of reads that brought blocks; bytes:
    kept now."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        def counters(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Counter]:
            metric = Counter(name, help, ["role", label], registry=registry)
            return {value: metric.labels(role, value) for value in known}

        self.reads = counters(
            "kvferry_tier_reads",
            "Reads of a prompt's blocks from the disk tier, by outcome: done, late (the disk was too slow: they were "
            "computed), failed (gone, not as they were written, or an error of the disk), refused (too many reads, or "
            "no room in the pool).",
            "outcome",
            TIER_OUTCOMES,
        )
        self.blocks = counters(
            "kvferry_tier_blocks",
            "KV blocks read from the disk tier, written to it, or lost to it (the disk did not keep up, or failed).",
            "way",
            TIER_WAYS,
        )
        self.seconds = Counter(
            "kvferry_tier_read_seconds", "Seconds that reads took which brought blocks.", ["role"], registry=registry
        ).labels(role)
        self.bytes = Gauge(
            "kvferry_tier_bytes", "Bytes of the files that the disk tier keeps.", ["role"], registry=registry
        ).labels(role)
