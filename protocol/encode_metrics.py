"""Router metrics of its calls to encode nodes, which encode images and audio."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvferry.protocol.labels import ENCODE_OUTCOMES


class EncodeMetrics:
    """Metrics of calls to encode nodes. calls: by outcome. seconds: of the calls that produced the embeddings."""

    def __init__(self, registry: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        calls = Counter(
            "kvferry_encode_calls",
            "Attempts with images or audio for which an encode node was asked, by outcome: encoded, cached (it had "
            "the embeddings), failed (another one was asked, or none), local (the prompt's node encodes itself).",
            ["outcome"],
            registry=registry,
        )
        self.calls = {outcome: calls.labels(outcome) for outcome in ENCODE_OUTCOMES}
        self.seconds = Histogram(
            "kvferry_encode_wait_seconds",
            "Seconds until an encode node had the embeddings of an attempt's images and audio.",
            registry=registry,
            buckets=buckets,
        )
