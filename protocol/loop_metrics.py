"""Metrics of event-loop lag: delay of timers, and time without a core."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
"""Upper bounds of the lag histogram's buckets, in seconds."""


class LoopMetrics:
    """Metrics of one event loop; see `runtime.loop_lag`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Histogram(
            "kvferry_event_loop_lag_seconds",
            "Delay of the event loop's timers in seconds, without the time in which its thread had no core.",
            registry=registry,
            buckets=LAG_BUCKETS,
        )
        self.core_wait = Counter(
            "kvferry_event_loop_without_core_seconds",
            "Seconds for which the event loop's thread was runnable but had no core: the machine is overcommitted.",
            registry=registry,
        )
