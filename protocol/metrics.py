"""Every metric of every process: names, help and labels in one place.

Each process builds the set of its role on its own registry and serves it at `GET /metrics`. Names follow Prometheus'
conventions: base units, `_total` on counters, `_seconds`, `_bytes`, `_tokens`. Label values that are known beforehand
exist at zero from the start, so that a rate or a ratio over them has a series before the first event.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SOURCES = ("computed", "reused_prefill", "reused_decode", "fetched")
PLACEMENT_KINDS = ("remote", "local")
RUNGS = ("same_prefill", "another_prefill", "local_prefill", "another_decode", "wait_for_room")
MISS_REASONS = ("evicted", "failover")
REFUSALS = ("rate", "queue", "limit")
TOKEN_KINDS = ("prompt", "cached", "output")
ROLES = ("prefill", "decode")
NODE_STATES = ("ready", "draining", "incompatible")
PHASES = ("prefill", "decode")
BLOCK_STATES = ("free", "active", "cached", "granted")
ATTEMPT_OUTCOMES = ("done", "cancelled", "failed")
SHIP_OUTCOMES = ("done", "aborted", "failed")
GRANT_OUTCOMES = ("granted", "refused", "aborted")
MODEL = ("model_name",)
"""The label that other servers use too."""
RENEWAL_OUTCOMES = ("renewed", "created", "fenced", "failed")


class RouterMetrics:
    """What the router counts. One instance per process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = registry or CollectorRegistry()
        self.requests = Counter(
            "kvferry_requests", "Requests finished, by endpoint and HTTP status.", ["endpoint", "status"], registry=r
        )
        self.inflight = Gauge("kvferry_requests_inflight", "Requests in progress.", registry=r)
        self.ttft = Histogram(
            "kvferry_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first output token, by model.",
            MODEL,
            registry=r,
            buckets=LATENCY_BUCKETS,
        )
        self.itl = Histogram(
            "kvferry_inter_token_latency_seconds",
            "Seconds between consecutive output tokens of one request, by model.",
            MODEL,
            registry=r,
            buckets=STEP_BUCKETS,
        )
        self.e2e = Histogram(
            "kvferry_request_seconds", "Seconds from arrival to last token.", registry=r, buckets=LATENCY_BUCKETS
        )
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens",
            "Prompt tokens of finished placements by source: computed, reused_prefill, reused_decode, fetched.",
            [*MODEL, "source"],
            registry=r,
        )
        self.output_tokens = Counter(
            "kvferry_output_tokens", "Output tokens delivered to clients, by model.", MODEL, registry=r
        )
        self.predicted_reuse = Counter(
            "kvferry_predicted_reuse_tokens", "Prompt tokens the placement expected to reuse.", registry=r
        )
        self.actual_reuse = Counter("kvferry_actual_reuse_tokens", "Prompt tokens that were reused.", registry=r)
        self.reuse_misses = Counter(
            "kvferry_reuse_miss_tokens",
            "Predicted but not reused tokens, by reason (evicted, failover).",
            ["reason"],
            registry=r,
        )
        self.account_violations = Counter(
            "kvferry_received_account_violations",
            "First tokens whose account of the prompt was wrong as the router read it: a bug of the node in its log.",
            registry=r,
        )
        self.placements = Counter(
            "kvferry_placements", "Attempts placed, by kind (remote, local).", ["kind"], registry=r
        )
        self.placement_regret = Counter(
            "kvferry_placement_regret_seconds",
            "Seconds by which time to first token exceeded the placement's estimate, summed.",
            registry=r,
        )
        self.ladder = Counter(
            "kvferry_ladder_rungs", "Attempts started after a failure, by rung of the ladder.", ["rung"], registry=r
        )
        self.nodes = Gauge("kvferry_nodes", "Live nodes by role and state.", ["role", "state"], registry=r)
        self.index_seconds = Histogram(
            "kvferry_index_lookup_seconds", "Seconds per longest-prefix lookup.", registry=r, buckets=STEP_BUCKETS
        )
        self.queued = Gauge("kvferry_requests_queued", "Requests that wait at the router for their turn.", registry=r)
        self.turn_wait = Histogram(
            "kvferry_turn_wait_seconds",
            "Seconds that requests waited at the router for their turn, of those that had to.",
            registry=r,
            buckets=LATENCY_BUCKETS,
        )
        self.refused = Counter(
            "kvferry_requests_refused",
            "Requests answered 429 by the router itself: rate (its tenant's limits), queue (its turn would come too "
            "late), limit (too many in progress).",
            ["reason"],
            registry=r,
        )
        self.tenant_tokens = Counter(
            "kvferry_tenant_tokens",
            "Tokens by tenant (empty: of no tenant's key) and kind: prompt, cached (of the prompt), output.",
            ["tenant", "kind"],
            registry=r,
        )
        self.registry_up = Gauge("kvferry_registry_up", "1 while Redis answers.", registry=r)
        _exist(self.requests, ENDPOINTS, ("200",))
        _exist(self.reuse_misses, MISS_REASONS)
        _exist(self.placements, PLACEMENT_KINDS)
        _exist(self.ladder, RUNGS)
        _exist(self.nodes, ROLES, NODE_STATES)
        _exist(self.refused, REFUSALS)
        _exist(self.tenant_tokens, ("",), TOKEN_KINDS)

    def of(self, model: str) -> ModelMetrics:
        """What is counted by model."""
        return ModelMetrics(
            ttft=self.ttft.labels(model),
            itl=self.itl.labels(model),
            prompt_tokens={source: self.prompt_tokens.labels(model, source) for source in SOURCES},
            output_tokens=self.output_tokens.labels(model),
        )


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Those metrics of a router that carry the label `model_name`, bound to one model. prompt_tokens: by source."""

    ttft: Histogram
    itl: Histogram
    prompt_tokens: dict[str, Counter]
    output_tokens: Counter


class WorkerMetrics:
    """What a prefill or decode process counts. Every metric carries the label `role`, bound here, for looking it up at
    every step costs more than counting. Those with one more label are dicts by its values, which are all known."""

    def __init__(self, role: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = registry or CollectorRegistry()

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, ["role"], registry=r).labels(role)

        def counters(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Counter]:
            metric = Counter(name, help, ["role", label], registry=r)
            return {value: metric.labels(role, value) for value in known}

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, ["role"], registry=r).labels(role)

        def gauges(name: str, help: str, label: str, known: tuple[str, ...]) -> dict[str, Gauge]:
            metric = Gauge(name, help, ["role", label], registry=r)
            return {value: metric.labels(role, value) for value in known}

        def histogram(name: str, help: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(name, help, ["role"], registry=r, buckets=buckets).labels(role)

        self.requests_waiting = gauge("kvferry_requests_waiting", "Requests queued in the engine.")
        self.waiting_tokens = gauge("kvferry_waiting_tokens", "Prompt tokens queued and not yet computed.")
        self.requests_running = gauge("kvferry_requests_running", "Requests scheduled in the last step.")
        self.attempts = counters(
            "kvferry_attempts",
            "Attempts ended, by outcome: done, cancelled (by the client, or at a stop string), failed.",
            "outcome",
            ATTEMPT_OUTCOMES,
        )
        self.queue = histogram("kvferry_queue_seconds", "Seconds from arrival at the node to the first scheduled step.")
        self.step = histogram("kvferry_step_seconds", "Seconds per engine step.", STEP_BUCKETS)
        self.step_tokens = counters(
            "kvferry_step_tokens", "Tokens computed, by phase (prefill, decode).", "phase", PHASES
        )
        self.preemptions = counter("kvferry_preemptions", "Requests preempted to be recomputed.")
        self.kv_blocks = gauges(
            "kvferry_kv_blocks", "KV blocks by state: free, active, cached, granted.", "state", BLOCK_STATES
        )
        self.kv_blocks_total = gauge("kvferry_kv_pool_blocks", "Size of the KV pool in blocks.")
        self.prefix_queries = counter(
            "kvferry_prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = counter("kvferry_prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache.")
        self.evictions = counter("kvferry_kv_blocks_evicted", "Cached blocks evicted.")
        self.ships = counters(
            "kvferry_ships",
            "Ships ended, by outcome: done, aborted (the request ended or was cancelled), failed.",
            "outcome",
            SHIP_OUTCOMES,
        )
        self.ship_bytes = counter("kvferry_ship_bytes", "KV bytes shipped or received.")
        self.ship_seconds = counter(
            "kvferry_ship_seconds", "Seconds between a ship's first block and its acknowledgement."
        )
        self.ship_exposed = counter(
            "kvferry_ship_exposed_seconds", "Part of the ship seconds that came after the first token was sampled."
        )
        self.grants = counters(
            "kvferry_grants", "Grants by outcome: granted, refused, aborted.", "outcome", GRANT_OUTCOMES
        )
        self.grants_open = gauge("kvferry_grants_open", "Grants whose blocks are reserved and not yet committed.")
        self.account_violations = counter(
            "kvferry_account_violations", "Prompts whose account of reused and computed tokens was wrong: a bug."
        )
        self.lease_renewals = counters(
            "kvferry_lease_renewals",
            "Lease renewals by outcome (renewed, created, fenced, failed).",
            "outcome",
            RENEWAL_OUTCOMES,
        )
        self.index_rows = gauge("kvferry_index_rows", "Block index rows this node has published.")
        self.index_pending = gauge("kvferry_index_pending", "Index updates not yet written.")


def _exist(metric: Counter | Gauge | Histogram, *values: tuple[str, ...]) -> None:
    """Create the children of all combinations of these label values."""
    for combination in product(*values):
        metric.labels(*combination)
