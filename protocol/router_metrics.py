"""Router metrics: names, help and labels (workers' are in `worker_metrics`).

Each process has its own registry and serves it at `GET /metrics`. Names follow Prometheus' conventions: base units,
`_total` on counters, `_seconds`, `_bytes`, `_tokens`. Children of known label values exist at zero from the start, so
that a rate or ratio has a series before the first event."""

from __future__ import annotations

from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.protocol import labels
from kvferry.protocol.batch_metrics import BatchMetrics
from kvferry.protocol.encode_metrics import EncodeMetrics
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.protocol.loop_metrics import LoopMetrics
from kvferry.protocol.model_metrics import ModelMetrics, live_nodes
from kvferry.protocol.reuse_metrics import ReuseMetrics
from kvferry.protocol.scaling_metrics import RouterScaling
from kvferry.protocol.token_histogram import TokenHistograms

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
"""Upper bounds of latency histograms' buckets, in seconds."""
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
"""Upper bounds of step-time histograms' buckets, in seconds."""


class UncheckedCounter(Counter):
    """Counter without the checks of its amount and labels, which take longer than counting."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self._value.inc(amount)


class RouterMetrics:
    """Metrics of a router process; one instance per process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = registry or CollectorRegistry()
        self.requests = UncheckedCounter(
            "kvferry_requests", "Requests finished, by endpoint and HTTP status.", ["endpoint", "status"], registry=r
        )
        self.inflight = Gauge("kvferry_requests_inflight", "Requests in progress.", registry=r)
        self.ttft = TokenHistograms(
            "kvferry_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first output token, by model.",
            labels.MODEL,
            registry=r,
            buckets=LATENCY_BUCKETS,
        )
        self.itl = TokenHistograms(
            "kvferry_inter_token_latency_seconds",
            "Seconds between consecutive output tokens of one request, by model.",
            labels.MODEL,
            registry=r,
            buckets=STEP_BUCKETS,
        )
        self.e2e = TokenHistograms(
            "kvferry_request_seconds", "Seconds from arrival to last token.", [], registry=r, buckets=LATENCY_BUCKETS
        )
        self.prompt_tokens = UncheckedCounter(
            "kvferry_prompt_tokens",
            "Prompt tokens of finished placements by source: computed, reused_prefill, reused_decode, fetched.",
            [*labels.MODEL, "source"],
            registry=r,
        )
        self.output_tokens = UncheckedCounter(
            "kvferry_output_tokens", "Output tokens delivered, by model.", labels.MODEL, registry=r
        )
        self.reuse = ReuseMetrics(r)
        self.account_violations = Counter(
            "kvferry_received_account_violations",
            "First tokens whose reuse accounting the router found wrong: a bug in the node named in the log.",
            registry=r,
        )
        self.placements = UncheckedCounter(
            "kvferry_placements",
            "Attempts started, by where the prompt is computed: remote (a prefill node), local (the decode node). A "
            "request starts one, and one more after each failure and for each hedge; migrations compute no prompt.",
            ["kind"],
            registry=r,
        )
        self.placement_regret = Counter(
            "kvferry_placement_regret_seconds",
            "Seconds by which times to first token exceeded the estimates, in total.",
            registry=r,
        )
        self.retries = Counter(
            "kvferry_retries",
            "Attempts after the first: retries by step of the retry policy, hedges of late requests, hedges of those "
            "whose node may hang (suspicion), migrations (move), streams that a draining node did not move in time "
            "(drain_timeout), requests that left a crowded decode node for one with room (room_elsewhere), or gave way "
            "to the targets of others (displaced).",
            ["step"],
            registry=r,
        )
        self.ladder_rungs = Counter(
            "kvferry_ladder_rungs", "Earlier name of kvferry_retries, kept for one release.", ["rung"], registry=r
        )
        self.false_suspicions = Counter(
            "kvferry_false_suspicions",
            "Requests that got a second attempt because their node might hang, and whose next token came from it.",
            registry=r,
        )
        recovered = Counter(
            "kvferry_recovered_tokens",
            "Tokens, prompts included, of streams that continued on another node after a failure, by source: "
            "cached, computed.",
            ["source"],
            registry=r,
        )
        self.recovered = {source: recovered.labels(source) for source in labels.RECOVERED_SOURCES}
        self.quarantines = Counter(
            "kvferry_quarantines",
            "Times that a pair of nodes, or one node, was quarantined for ten minutes because too many "
            "transfers were wrong.",
            registry=r,
        )
        self.nodes = live_nodes(r)
        self.index_seconds = Histogram(
            "kvferry_index_lookup_seconds", "Seconds per longest-prefix lookup.", registry=r, buckets=STEP_BUCKETS
        )
        self.queued = Gauge("kvferry_requests_queued", "Requests queued at the router.", registry=r)
        self.turn_wait = Histogram(
            "kvferry_turn_wait_seconds",
            "Seconds that queued requests waited at the router.",
            registry=r,
            buckets=LATENCY_BUCKETS,
        )
        self.refused = Counter(
            "kvferry_requests_refused",
            "Requests answered 429 by the router itself: rate (limits of the tenant), queue (too long), limit "
            "(of the router).",
            ["reason"],
            registry=r,
        )
        self.errors = Counter(
            "kvferry_error_answers",
            "Requests answered 429 or 5xx, by status and the error's code: overloaded, no_nodes, "
            "registry_unavailable and others; kvferry_requests_refused_total breaks down the router's own 429 answers.",
            ["status", "code"],
            registry=r,
        )
        self.tenant_tokens = UncheckedCounter(
            "kvferry_tenant_tokens",
            "Tokens by tenant (empty: requests without a tenant's key) and kind: prompt, cached (of the "
            "prompt), output.",
            ["tenant", "kind"],
            registry=r,
        )
        self.ttft_targets = Counter(
            "kvferry_ttft_targets",
            "Requests of tenants with ttft_ms, by outcome: met, missed, rejected (on arrival, since the target would "
            "have been missed).",
            ["tenant", "outcome"],
            registry=r,
        )
        self.itl_targets = Counter(
            "kvferry_itl_targets",
            "Requests of tenants with itl_ms, by outcome: met or missed by the mean time between the tokens of the "
            "slowest sequence, rejected (on arrival, since the target would have been missed).",
            ["tenant", "outcome"],
            registry=r,
        )
        self.encodes = EncodeMetrics(r, LATENCY_BUCKETS)
        self.registry_up = Gauge("kvferry_registry_up", "1 while Redis answers.", registry=r)
        self.loop = LoopMetrics(r)
        self.journals = JournalMetrics(r)
        self.batches = BatchMetrics(r)
        self.scaling = RouterScaling(r)
        self.e2e.labels()
        _create_children(self.requests, labels.ENDPOINTS, ("200",))
        _create_children(self.placements, labels.PLACEMENT_KINDS)
        _create_children(self.retries, labels.RETRY_STEPS)
        _create_children(self.ladder_rungs, labels.RETRY_STEPS)
        _create_children(self.refused, labels.REFUSALS)
        for status, code in labels.ERROR_ANSWERS:
            self.errors.labels(status, code)
        _create_children(self.tenant_tokens, ("",), labels.TOKEN_KINDS)
        for targets in (self.ttft_targets, self.itl_targets):
            _create_children(targets, ("",), labels.TARGET_OUTCOMES)

    def retried(self, step: str) -> None:
        """Count an attempt after the first, under both names of the metric."""
        self.retries.labels(step).inc()
        self.ladder_rungs.labels(step).inc()

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of one model."""
        self.scaling.exist(model)
        self.reuse.of(model)
        _create_children(self.nodes, labels.NODE_ROLES, labels.NODE_STATES, (model,))
        return ModelMetrics(
            ttft=self.ttft.labels(model),
            itl=self.itl.labels(model),
            prompt_tokens={source: self.prompt_tokens.labels(model, source) for source in labels.SOURCES},
            output_tokens=self.output_tokens.labels(model),
        )


def _create_children(metric: Counter | Gauge | Histogram, *values: tuple[str, ...]) -> None:
    """Create the children of all combinations of these label values."""
    for combination in product(*values):
        metric.labels(*combination)
