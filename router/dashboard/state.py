"""Pydantic models of `GET /dashboard/state`: the cluster as one router sees it.

Loads, pools and rates are the nodes' latest reports, which cover the work of all routers. Requests, streams, ships and
events are this router's own. Times are in seconds; `ago_s` counts back from the snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from kvferry.protocol.labels import TARGET_OUTCOMES


class Blocks(BaseModel):
    """Block counts of a node's pool by use; with `free` they make `total`."""

    active: int
    cached: int
    granted: int
    free: int
    total: int


class Node(BaseModel):
    """Node as this router sees it; `state` is the one in the metrics.

    `trouble` is why it gets no new work from this router: unreachable, stalled, suspected, quarantined, or empty.
    `streams` counts this router's requests there. `most_running` is 0 if the node does not report it. Rates are
    learned."""

    id: str
    role: str
    model: str
    state: str
    trouble: str
    blocks: Blocks
    running: int
    most_running: int
    waiting: int
    waiting_tokens: int
    streams: int
    prefill_tokens_per_s: float
    step_s: float
    ship_bytes_per_s: float


class Counts(BaseModel):
    """Counters over the last `seconds`.

    prompt         prompt tokens by source
    predicted      prompt tokens predicted to be reused
    missed         predicted tokens that were not reused, by reason
    first_token_s  mean time to first token (TTFT) of the `first_tokens` requests
    itl_s          mean inter-token latency (ITL) of the `later_tokens` tokens after first ones
    failed         requests answered with a status of 500 or above
    refused        requests answered with 429 or such a status, by status and error code
    retries        attempts after the first, by step of the retry policy
    """

    ago_s: float
    seconds: float
    requests: int
    failed: int
    prompt: dict[str, int]
    predicted: int
    missed: dict[str, int]
    output: int
    first_tokens: int
    first_token_s: float | None
    later_tokens: int = 0
    itl_s: float | None = None
    refused: dict[str, int] = {}
    retries: dict[str, int] = {}

    @classmethod
    def of(cls, points: Sequence[Counts]) -> Counts:
        """Return the sum of consecutive periods."""
        firsts = sum(point.first_tokens for point in points)
        waited_s = sum(point.first_tokens * (point.first_token_s or 0.0) for point in points)
        later = sum(point.later_tokens for point in points)
        between_s = sum(point.later_tokens * (point.itl_s or 0.0) for point in points)
        sums: dict[str, Counter[str]] = {name: Counter() for name in ("prompt", "missed", "refused", "retries")}
        for point in points:
            for name, found in sums.items():
                found.update(getattr(point, name))
        return cls(
            ago_s=min((point.ago_s for point in points), default=0.0),
            seconds=sum(point.seconds for point in points),
            requests=sum(point.requests for point in points),
            failed=sum(point.failed for point in points),
            predicted=sum(point.predicted for point in points),
            **sums,
            output=sum(point.output for point in points),
            first_tokens=firsts,
            first_token_s=waited_s / firsts if firsts else None,
            later_tokens=later,
            itl_s=between_s / later if later else None,
        )

    @property
    def reused(self) -> int:
        """Return the prompt tokens that were not computed."""
        return sum(tokens for source, tokens in self.prompt.items() if source != "computed")

    @property
    def hit_rate(self) -> float | None:
        """Return the reused fraction of the prompt tokens; None without prompts."""
        total = sum(self.prompt.values())
        return self.reused / total if total else None


class Transfer(BaseModel):
    """Transfers from one node to another in the last seconds (see State.transfers_s).

    `kind` is ship (a prompt of this router), copy (running streams, to the node that would take over) or move (streams
    of a draining node); copies and moves cover all routers. `seconds` is a ship's mean duration."""

    kind: str = "ship"
    source: str
    target: str
    transfers: int
    blocks: int
    bytes_per_s: float
    seconds: float | None = None


class RequestSummary(BaseModel):
    """Request, or one sequence of it.

    prefill  empty if the decode node computes the prompt
    seconds  from arrival to end, or until now
    ago_s    time since its end, None while running
    retries  attempts after the first
    outcome  running, done, cancelled (its client left), or an error code

    `id` and `tenant` are empty for requests of other tenants."""

    id: str
    tenant: str
    model: str
    work: str
    prefill: str
    decode: str
    prompt: int
    cached: int
    output: int
    queued_s: float
    first_token_s: float | None
    seconds: float
    ago_s: float | None
    retries: int
    outcome: str


class Event(BaseModel):
    """Event: a step of the retry policy with the nodes at fault, or a change of a node.

    Changes of nodes: joined, ready, draining, role (changed), lost."""

    ago_s: float
    kind: str
    nodes: list[str]
    told: str
    request: str
    tenant: str


class Suspect(BaseModel):
    """Node or pair that receives no new work for another `seconds`.

    `kind` is `node`, `ships` between nodes, or `quarantine` after too many corrupt ships. An empty name means all
    nodes."""

    kind: str
    prefill: str
    decode: str
    seconds: float


class Attainment(BaseModel):
    """Requests of a tenant by the outcome of a target, since the router started.

    `target` is ttft or itl, `tenant` empty for requests without a tenant's key."""

    tenant: str
    target: str
    met: int = 0
    missed: int = 0
    rejected: int = 0

    @property
    def share(self) -> float:
        """Return the share of the requests that met the target."""
        return self.met / max(1, self.met + self.missed + self.rejected)

    @classmethod
    def of(cls, rows: Iterable[Attainment]) -> list[Attainment]:
        """Return one row for each tenant and target, with the sums of its rows."""
        found: dict[tuple[str, str], Attainment] = {}
        for row in rows:
            known = found.setdefault((row.tenant, row.target), cls(tenant=row.tenant, target=row.target))
            for outcome in TARGET_OUTCOMES:
                setattr(known, outcome, getattr(known, outcome) + getattr(row, outcome))
        return [found[key] for key in sorted(found)]


class State(BaseModel):
    """State of the cluster, seen from one router.

    registry    true if the registry answers
    queued      requests that wait for a slot in the router
    nodes       the shown nodes of `nodes_total`
    points      counts by period up to now; `total` counts since the router started
    running     the oldest of `running_total` requests
    recent      ended requests, latest first, like `events`
    targets     attainment of the tenants that have targets; a tenant sees its own
    """

    router: str
    version: str
    up_s: float
    registry: bool
    models: list[str]
    queued: int
    nodes: list[Node]
    nodes_total: int
    points: list[Counts]
    total: Counts
    transfers: list[Transfer]
    transfers_s: float
    running: list[RequestSummary]
    running_total: int
    recent: list[RequestSummary]
    events: list[Event]
    suspects: list[Suspect]
    targets: list[Attainment] = []
