"""Metrics by which autoscalers size node pools: backlog, pressure, prefill rate and latency.

Each process reports its own part; the sum over all processes is the pool's value."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from kvferry.protocol import labels
from kvferry.protocol.model_metrics import ModelRegistry

BACKLOG = "kvferry_prefill_backlog_seconds"
BACKLOG_HELP = (
    "Seconds one node needs for the uncached prompt tokens queued in this process, at the measured rate. Sum over "
    "routers and nodes; divided by the number of prefill nodes, it is their backlog in seconds."
)
PRESSURE = "kvferry_decode_pressure"
PRESSURE_HELP = (
    "Decode nodes that the streams of this process would fill: the largest demand by slots, KV blocks and latency, "
    "plus that of waiting requests. Sum over routers and nodes; a router's value is negative where fewer nodes than "
    "the full ones would do."
)


class NodeScaling:
    """Scaling gauges of a worker, for its role.

    All are zero when it is idle, except for the rate, which it remembers."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return registry.family(Gauge, name, help, ["role"]).labels(role)

        self.prefill_backlog = gauge(BACKLOG, BACKLOG_HELP)
        self.decode_pressure = gauge(PRESSURE, PRESSURE_HELP)
        self.prefill_rate = gauge(
            "kvferry_prefill_rate_tokens_per_second",
            "Prompt tokens per second that the node computes, last measurement. Sum over nodes.",
        )
        self.admission_wait = gauge(
            "kvferry_admission_wait_seconds",
            "Seconds for which the next request has waited for a slot or for blocks. Use the maximum.",
        )
        self.itl_ratio = gauge(
            "kvferry_inter_token_target_ratio",
            "Inter-token latency of streams here, relative to --itl-target-ms; 0 without streams. Use the maximum.",
        )


class RouterScaling:
    """Scaling gauges of a router: the load that waits in it, by model.

    Values are computed when the router is scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prefill_backlog = Gauge(BACKLOG, BACKLOG_HELP, labels.MODEL, registry=registry)
        self.decode_pressure = Gauge(PRESSURE, PRESSURE_HELP, labels.MODEL, registry=registry)
        self.held = Gauge(
            "kvferry_requests_held",
            "Requests that the router holds because no node can take them, for example while the first node starts. "
            "Sum over routers.",
            labels.MODEL,
            registry=registry,
        )

    def exist(self, model: str) -> None:
        """Create the model's gauges, at zero."""
        for gauge in (self.prefill_backlog, self.decode_pressure, self.held):
            gauge.labels(model)

    def follow(
        self,
        model: str,
        prefill_backlog_s: Callable[[], float],
        decode_pressure: Callable[[], float],
        held: Callable[[], float],
    ) -> None:
        """Set the functions that return a model's values."""
        self.prefill_backlog.labels(model).set_function(prefill_backlog_s)
        self.decode_pressure.labels(model).set_function(decode_pressure)
        self.held.labels(model).set_function(held)
