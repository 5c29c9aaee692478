"""Metrics of a decode node under vLLM's names, for routers and dashboards of other projects."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from kvferry.engine.events import Admitted, Event, Failed, Generated
from kvferry.engine.request import Key
from kvferry.protocol.lease import Load
from kvferry.protocol.router_metrics import LATENCY_BUCKETS, STEP_BUCKETS
from kvferry.protocol.token_histogram import TokenHistograms
from kvferry.worker.service import NodeParts


class VllmMetrics:
    """Metrics of all of the node's requests, whichever router sent them. They belong to the asyncio loop.

    Gauges are read when they are scraped. The label `model_name` comes from the node's registry."""

    def __init__(self, base: NodeParts) -> None:
        registry = base.metrics.registry
        self._last: dict[Key, float] = {}

        def gauge(name: str, description: str, read: Callable[[Load], float]) -> None:
            Gauge(f"vllm:{name}", description, registry=registry).set_function(lambda: read(base.engine.load))

        def counter(name: str, description: str) -> Counter:
            return Counter(f"vllm:{name}", description, registry=registry)

        gauge("num_requests_running", "Requests that run.", lambda load: load.running_requests)
        gauge("num_requests_waiting", "Requests that wait in the engine.", lambda load: load.waiting_requests)
        gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", _usage)
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that this node prefilled.")
        self._output = counter("generation_tokens", "Output tokens.")
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Seconds from arrival at this node to its first output token.",
            registry=registry, buckets=LATENCY_BUCKETS,
        )  # fmt: skip
        self._itl = TokenHistograms(
            "vllm:inter_token_latency_seconds", "Seconds between consecutive output tokens of one request.", (),
            registry=registry, buckets=STEP_BUCKETS,
        ).labels()  # fmt: skip
        pool, size = base.parts.engine.pool, base.parts.layout.block_size
        cache = Gauge("vllm:cache_config_info", "The KV pool.", ["block_size", "num_gpu_blocks"], registry=registry)
        cache.labels(str(size), str(pool.num_blocks)).set(1)

    def take(self, events: Sequence[Event]) -> None:
        """Count the events of one engine turn."""
        now, made = time.monotonic(), Tally[Key]()
        ended: list[Key] = []
        for event in events:
            if isinstance(event, Admitted):
                self._queries.inc(event.queried)
                self._hits.inc(event.hit)
            elif isinstance(event, Generated):
                made[event.key] += len(event.delta.token_ids)
                if event.delta.reuse is not None:
                    self._prompt.inc(event.delta.reuse.prompt_len)
                    self._ttft.observe(event.queue_s + event.compute_s)
                if event.delta.finish_reason is not None:
                    ended.append(event.key)
            elif isinstance(event, Failed):
                ended.append(event.key)
        self._output.inc(made.total())
        for key, count in made.items():
            last = self._last.get(key)
            if last is not None and count:
                self._itl.observe((now - last) / count, count)
            self._last[key] = now
        for key in ended:
            self._last.pop(key, None)


def _usage(load: Load) -> float:
    return (load.active_blocks + load.granted_blocks) / max(1, load.total_blocks)
