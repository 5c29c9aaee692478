"""Worker metrics of recurrent states: checkpoints saved into and loaded from the pool."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.model_metrics import ModelRegistry


class StateMetrics:
    """Recurrent-state metrics of a worker. checkpoints: by way, saved or loaded; 0 without recurrent layers."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        family = registry.family(
            Counter,
            "kvferry_state_checkpoints",
            "Checkpoints of recurrent states: saved into blocks of the pool, and loaded for requests that reuse them.",
            ["role", "way"],
        )
        self.checkpoints = {way: family.labels(role, way) for way in ("saved", "loaded")}
