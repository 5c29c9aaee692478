"""Worker metrics of KV tiers (host memory, disk, remote store): reads, blocks, seconds and bytes."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvferry.protocol.labels import OWN_TIERS, TIER_OUTCOMES, TIER_WAYS, TIERS
from kvferry.protocol.model_metrics import ModelRegistry


class TierMetrics:
    """KV tier metrics of a worker, by tier.

    reads: by outcome. blocks: by way (read, written, lost). seconds: duration of the reads that brought blocks. bytes:
    in the node's own tiers."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        def counters(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, dict[str, Counter]]:
            metric = registry.family(Counter, name, help, ["role", "tier", label])
            return {tier: {value: metric.labels(role, tier, value) for value in known} for tier in TIERS}

        self.reads = counters(
            "kvferry_tier_reads",
            "Reads of a prompt's blocks from a tier (host, disk, or remote), by outcome: done, late (computing them "
            "was faster), failed (gone, corrupt, or an error of the tier), refused (too many reads, or no room in "
            "the pool).",
            "outcome",
            TIER_OUTCOMES,
        )
        self.blocks = counters(
            "kvferry_tier_blocks",
            "KV blocks read from a tier (host, disk, or remote), written to it, or dropped (it was too slow or "
            "failed).",
            "way",
            TIER_WAYS,
        )
        seconds = registry.family(
            Counter,
            "kvferry_tier_read_seconds",
            "Seconds of tier reads that brought blocks.",
            ["role", "tier"],
        )
        self.seconds = {tier: seconds.labels(role, tier) for tier in TIERS}
        kept = registry.family(
            Gauge, "kvferry_tier_bytes", "Bytes of the blocks in the node's own tiers.", ["role", "tier"]
        )
        self.bytes = {tier: kept.labels(role, tier) for tier in OWN_TIERS}
