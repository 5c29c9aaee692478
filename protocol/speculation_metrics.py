"""Worker metrics of speculative decoding: tokens drafted and accepted."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.model_metrics import ModelRegistry


class SpeculationMetrics:
    """Speculation metrics of a worker.

    drafted, accepted: tokens."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return registry.family(Counter, name, text, ["role"]).labels(role)

        self.drafted = counter(
            "kvferry_spec_decode_draft_tokens",
            "Draft tokens verified (speculative decoding).",
        )
        self.accepted = counter("kvferry_spec_decode_accepted_tokens", "Draft tokens accepted.")
