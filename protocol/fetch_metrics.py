"""Worker metrics of KV blocks fetched from other nodes and supplied to them."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.labels import FETCH_OUTCOMES, FETCH_WAYS
from kvferry.protocol.model_metrics import ModelRegistry


class FetchMetrics:
    """Prefix fetch metrics of a worker.

    ended: by outcome. blocks, bytes: fetched and given. seconds: duration of the fetches that brought blocks."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        def counters(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Counter]:
            metric = registry.family(Counter, name, help, ["role", label])
            return {value: metric.labels(role, value) for value in known}

        self.ended = counters(
            "kvferry_fetches",
            "Fetches of a prompt's blocks from another node, by outcome: done, lacking (it no longer has them), "
            "refused (it drains or serves too many fetches, or no memory here), late, corrupt (wrong checksum), lost"
            " (the node or the connection), cancelled (the request ended).",
            "outcome",
            FETCH_OUTCOMES,
        )
        self.blocks = counters(
            "kvferry_fetch_blocks", "KV blocks fetched from other nodes or sent to them.", "way", FETCH_WAYS
        )
        self.bytes = counters("kvferry_fetch_bytes", "Bytes of the KV blocks fetched or sent.", "way", FETCH_WAYS)
        self.seconds = registry.family(
            Counter, "kvferry_fetch_seconds", "Seconds of fetches that brought blocks.", ["role"]
        ).labels(role)
