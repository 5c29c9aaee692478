"""Metrics of a worker (`WorkerMetrics`): names, help and labels, bound to the worker's role."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from kvferry.protocol import labels
from kvferry.protocol.canary_metrics import CanaryMetrics
from kvferry.protocol.fetch_metrics import FetchMetrics
from kvferry.protocol.media_metrics import MediaMetrics
from kvferry.protocol.model_metrics import ModelRegistry
from kvferry.protocol.router_metrics import LATENCY_BUCKETS, STEP_BUCKETS
from kvferry.protocol.scaling_metrics import NodeScaling
from kvferry.protocol.session_metrics import SessionMetrics
from kvferry.protocol.speculation_metrics import SpeculationMetrics
from kvferry.protocol.state_metrics import StateMetrics
from kvferry.protocol.tier_metrics import TierMetrics


class WorkerMetrics:
    """Metrics of a prefill or decode process.

    Every metric is bound to the label `role` here, because a lookup at every step costs more than counting. Metrics
    with one more label are dicts by its values, which are all known. All are exposed with `registry.model_name`, which
    the caller sets."""

    def __init__(self, role: str, registry: ModelRegistry | None = None) -> None:
        self.registry = registry or ModelRegistry()
        self.count_as(role)

    def count_as(self, role: str) -> None:
        """Bind all metrics to this role from now on.

        Counters of an earlier role keep their values; gauges are reported for this role only."""
        self.role, r = role, self.registry
        r.forget_gauges()

        def counter(name: str, help: str) -> Counter:
            return r.family(Counter, name, help, ["role"]).labels(role)

        def counters(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Counter]:
            metric = r.family(Counter, name, help, ["role", label])
            return {value: metric.labels(role, value) for value in known}

        def gauge(name: str, help: str) -> Gauge:
            return r.family(Gauge, name, help, ["role"]).labels(role)

        def gauges(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Gauge]:
            metric = r.family(Gauge, name, help, ["role", label])
            return {value: metric.labels(role, value) for value in known}

        def histogram(name: str, help: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return r.family(Histogram, name, help, ["role"], buckets=buckets).labels(role)

        self.requests_waiting = gauge("kvferry_requests_waiting", "Requests queued in the engine.")
        self.waiting_tokens = gauge("kvferry_waiting_tokens", "Prompt tokens queued and not yet computed.")
        self.requests_running = gauge("kvferry_requests_running", "Requests scheduled in the last step.")
        self.attempts = counters(
            "kvferry_attempts",
            "Attempts ended, by outcome: done, cancelled (by the client, or at a stop string), failed, moved.",
            "outcome",
            labels.ATTEMPT_OUTCOMES,
        )
        self.queue = histogram("kvferry_queue_seconds", "Seconds from arrival at the node to the first scheduled step.")
        self.step = histogram("kvferry_step_seconds", "Seconds per engine step.", STEP_BUCKETS)
        self.step_tokens = counters(
            "kvferry_step_tokens", "Tokens computed, by phase (prefill, decode).", "phase", labels.PHASES
        )
        self.preemptions = counter("kvferry_preemptions", "Requests preempted to be recomputed.")
        self.kv_blocks = gauges(
            "kvferry_kv_blocks", "KV blocks by state: free, active, cached, granted.", "state", labels.BLOCK_STATES
        )
        self.kv_blocks_total = gauge("kvferry_kv_pool_blocks", "Size of the KV pool in blocks.")
        self.leaked = gauge(
            "kvferry_kv_outlived_hold_seconds",
            "Seconds for which the oldest reservation of blocks has outlived its reason.",
        )
        self.prefix_queries = counter("kvferry_prefix_cache_queries_tokens", "Prompt tokens looked up in the cache.")
        self.prefix_hits = counter("kvferry_prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache.")
        self.evictions = counter("kvferry_kv_blocks_evicted", "Cached blocks evicted.")
        self.ships = counters(
            "kvferry_ships",
            "Prefill-to-decode transfers ended, by outcome: done, aborted (the request ended), failed, corrupt "
            "(wrong checksum).",
            "outcome",
            labels.SHIP_OUTCOMES,
        )
        self.ship_bytes = counter("kvferry_ship_bytes", "KV bytes sent or received.")
        self.ship_seconds = counter(
            "kvferry_ship_seconds",
            "Seconds of transfers, from the first block sent to the acknowledgement of the last.",
        )
        self.ship_exposed = counter(
            "kvferry_ship_exposed_seconds", "Seconds of kvferry_ship_seconds after the first token."
        )
        self.grants = counters(
            "kvferry_grants", "Grants by outcome: granted, refused, aborted.", "outcome", labels.GRANT_OUTCOMES
        )
        self.grants_open = gauge("kvferry_grants_open", "Grants whose blocks are reserved and not yet committed.")
        self.moves = counters(
            "kvferry_moves",
            "Streams that a draining node tried to migrate, by outcome.",
            "outcome",
            labels.MOVE_OUTCOMES,
        )
        self.move_blocks = counter("kvferry_move_blocks", "KV blocks of migrated streams.")
        self.move_pause = counter("kvferry_move_pause_seconds", "Seconds for which migrated streams paused.")
        self.copies = counters(
            "kvferry_copies",
            "Copies of running streams' blocks to other nodes, by outcome: done, refused (no room, or draining), "
            "failed (the stream ended, or the connection).",
            "outcome",
            labels.COPY_OUTCOMES,
        )
        self.copy_blocks = counters(
            "kvferry_copy_blocks",
            "KV blocks of these copies: sent, or held for streams of other nodes.",
            "way",
            labels.COPY_WAYS,
        )
        self.fetches, self.tiers = FetchMetrics(role, r), TierMetrics(role, r)
        self.canary, self.speculation = CanaryMetrics(role, r), SpeculationMetrics(role, r)
        self.states, self.media = StateMetrics(role, r), MediaMetrics(role, r)
        self.scaling, self.sessions = NodeScaling(role, r), SessionMetrics(role, r)
        self.account_violations = counter("kvferry_account_violations", "Prompts with wrong reuse accounting: a bug.")
        self.lease_renewals = counters(
            "kvferry_lease_renewals", "Lease renewals by outcome.", "outcome", labels.RENEWAL_OUTCOMES
        )
        self.index_rows = gauge("kvferry_index_rows", "Block index rows this node has published.")
        self.index_pending = gauge("kvferry_index_pending", "Index updates not yet written.")
        self.role_changes = counters(
            "kvferry_role_changes",
            "Changes of the node's role (--elastic), by outcome: done (counted in the new role), kept (it was needed"
            " in its role, or could not leave it in time).",
            "outcome",
            labels.ROLE_OUTCOMES,
        )
