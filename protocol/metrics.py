"""Every metric of every process: names, help and labels in one place.

Each process builds the set of its role on its own registry and serves it at `GET /metrics`. Names follow Prometheus'
conventions: base units, `_total` on counters, `_seconds`, `_bytes`, `_tokens`. Label values that are known beforehand
exist at zero from the start, so that a rate or a ratio over them has a series before the first event.
"""

from __future__ import annotations

from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol import labels
from protocol.canary_metrics import CanaryMetrics
from protocol.fetch_metrics import FetchMetrics
from protocol.loop_metrics import LoopMetrics
from protocol.model_metrics import ModelMetrics, ModelRegistry, live_nodes
from protocol.reuse_metrics import ReuseMetrics
from protocol.scaling_metrics import NodeScaling, RouterScaling
from protocol.speculation_metrics import SpeculationMetrics
from protocol.tier_metrics import TierMetrics

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


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
            labels.MODEL,
            registry=r,
            buckets=LATENCY_BUCKETS,
        )
        self.itl = Histogram(
            "kvferry_inter_token_latency_seconds",
            "Seconds between consecutive output tokens of one request, by model.",
            labels.MODEL,
            registry=r,
            buckets=STEP_BUCKETS,
        )
        self.e2e = Histogram(
            "kvferry_request_seconds", "Seconds from arrival to last token.", registry=r, buckets=LATENCY_BUCKETS
        )
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens",
            "Prompt tokens of finished placements by source: computed, reused_prefill, reused_decode, fetched.",
            [*labels.MODEL, "source"],
            registry=r,
        )
        self.output_tokens = Counter(
            "kvferry_output_tokens", "Output tokens delivered, by model.", labels.MODEL, registry=r
        )
        self.reuse = ReuseMetrics(r)
        self.account_violations = Counter(
            "kvferry_received_account_violations",
            "First tokens whose account of the prompt was wrong as the router read it: a bug of the node in its log.",
            registry=r,
        )
        self.placements = Counter(
            "kvferry_placements", "Attempts placed, by kind: remote, local.", ["kind"], registry=r
        )
        self.placement_regret = Counter(
            "kvferry_placement_regret_seconds",
            "Seconds by which time to first token exceeded the placement's estimate, summed.",
            registry=r,
        )
        self.ladder = Counter(
            "kvferry_ladder_rungs",
            "Attempts started after a failure, beside a late one (hedge), or to leave a draining node (move), by rung.",
            ["rung"],
            registry=r,
        )
        recovered = Counter(
            "kvferry_recovered_tokens",
            "Tokens, prompts included, of streams that went on elsewhere after a failure, by source: cached, computed.",
            ["source"],
            registry=r,
        )
        self.recovered = {source: recovered.labels(source) for source in labels.RECOVERED_SOURCES}
        self.quarantines = Counter(
            "kvferry_quarantines",
            "Times that a pair of nodes, or one node, got no more ships for ten minutes: too many were wrong.",
            registry=r,
        )
        self.nodes = live_nodes(r)
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
            "Requests answered 429 by the router itself: rate (its tenant's limits), queue (its turn is late), limit.",
            ["reason"],
            registry=r,
        )
        self.errors = Counter(
            "kvferry_error_answers",
            "Requests answered 429 or 5xx, by status and the error's code: overloaded, no_nodes, registry_unavailable "
            "and others; of the 429 of a router itself kvferry_requests_refused_total tells more.",
            ["status", "code"],
            registry=r,
        )
        self.tenant_tokens = Counter(
            "kvferry_tenant_tokens",
            "Tokens by tenant (empty: of no tenant's key) and kind: prompt, cached (of the prompt), output.",
            ["tenant", "kind"],
            registry=r,
        )
        self.registry_up = Gauge("kvferry_registry_up", "1 while Redis answers.", registry=r)
        self.loop = LoopMetrics(r)
        self.scaling = RouterScaling(r)
        _exist(self.requests, labels.ENDPOINTS, ("200",))
        _exist(self.placements, labels.PLACEMENT_KINDS)
        _exist(self.ladder, labels.RUNGS)
        _exist(self.refused, labels.REFUSALS)
        for status, code in labels.ERROR_ANSWERS:
            self.errors.labels(status, code)
        _exist(self.tenant_tokens, ("",), labels.TOKEN_KINDS)

    def of(self, model: str) -> ModelMetrics:
        """What is counted by model."""
        self.scaling.exist(model)
        self.reuse.of(model)
        _exist(self.nodes, labels.ROLES, labels.NODE_STATES, (model,))
        return ModelMetrics(
            ttft=self.ttft.labels(model),
            itl=self.itl.labels(model),
            prompt_tokens={source: self.prompt_tokens.labels(model, source) for source in labels.SOURCES},
            output_tokens=self.output_tokens.labels(model),
        )


class WorkerMetrics:
    """What a prefill or decode process counts. Every metric carries the label `role`, bound here, for looking it up at
    every step costs more than counting. Those with one more label are dicts by its values, which are all known. All are
    served with `registry.model_name`, which is the caller's to set."""

    def __init__(self, role: str, registry: ModelRegistry | None = None) -> None:
        self.registry = r = registry or ModelRegistry()

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
        self.outlived = gauge(
            "kvferry_kv_outlived_hold_seconds", "Seconds for which the oldest hold on blocks has outlived its cause."
        )
        self.prefix_queries = counter("kvferry_prefix_cache_queries_tokens", "Prompt tokens looked up in the cache.")
        self.prefix_hits = counter("kvferry_prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache.")
        self.evictions = counter("kvferry_kv_blocks_evicted", "Cached blocks evicted.")
        self.ships = counters(
            "kvferry_ships",
            "Ships ended, by outcome: done, aborted (the request ended), failed, corrupt (a checksum was wrong).",
            "outcome",
            labels.SHIP_OUTCOMES,
        )
        self.ship_bytes = counter("kvferry_ship_bytes", "KV bytes shipped or received.")
        self.ship_seconds = counter(
            "kvferry_ship_seconds",
            "Seconds in which ships had blocks on the link, or awaited the acknowledgement of all.",
        )
        self.ship_exposed = counter("kvferry_ship_exposed_seconds", "Those of them that came after the first token.")
        self.grants = counters(
            "kvferry_grants", "Grants by outcome: granted, refused, aborted.", "outcome", labels.GRANT_OUTCOMES
        )
        self.grants_open = gauge("kvferry_grants_open", "Grants whose blocks are reserved and not yet committed.")
        self.moves = counters(
            "kvferry_moves",
            "Streams that a drain tried to move elsewhere, by outcome.",
            "outcome",
            labels.MOVE_OUTCOMES,
        )
        self.move_blocks = counter("kvferry_move_blocks", "KV blocks that left with them.")
        self.move_pause = counter("kvferry_move_pause_seconds", "Seconds in which they stood still.")
        self.copies = counters(
            "kvferry_copies",
            "Copies of running streams' blocks to other nodes, by outcome: done, refused (no room there, or draining), "
            "failed (the stream ended, or the way there).",
            "outcome",
            labels.COPY_OUTCOMES,
        )
        self.copy_blocks = counters(
            "kvferry_copy_blocks",
            "KV blocks of such copies: sent, or kept for streams elsewhere.",
            "way",
            labels.COPY_WAYS,
        )
        self.fetches, self.tiers = FetchMetrics(role, r), TierMetrics(role, r)
        self.canary, self.speculation = CanaryMetrics(role, r), SpeculationMetrics(role, r)
        self.scaling = NodeScaling(role, r)
        self.account_violations = counter("kvferry_account_violations", "Prompts whose account was wrong: a bug.")
        self.lease_renewals = counters(
            "kvferry_lease_renewals", "Lease renewals by outcome.", "outcome", labels.RENEWAL_OUTCOMES
        )
        self.index_rows = gauge("kvferry_index_rows", "Block index rows this node has published.")
        self.index_pending = gauge("kvferry_index_pending", "Index updates not yet written.")


def _exist(metric: Counter | Gauge | Histogram, *values: tuple[str, ...]) -> None:
    """Create the children of all combinations of these label values."""
    for combination in product(*values):
        metric.labels(*combination)
