"""State of the cluster as the dashboard and `GET /dashboard/state` show it, seen from one router.

Loads, pools and rates are what nodes last said of themselves, of all routers' work; requests, streams, ships and events
are this router's own. Times are seconds, `ago_s` back from the picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel


class Blocks(BaseModel):
    """Block counts of a node's pool by use; with `free` they make `total`."""

    active: int
    cached: int
    granted: int
    free: int
    total: int


class Node(BaseModel):
    """`state` as the metrics tell it.

    trouble: why nothing new goes there, as far as this router knows: unreachable, stalled, suspected, quarantined; or
    nothing. `streams`: requests of this router there; `most_running`: 0 where the node does not tell. The rates are
    those that it learned."""

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

    prompt: tokens of prompts by where they came from; predicted: those of them that were expected to be reused; missed:
    those of these that were not, by reason; first_token_s: the mean time to them, where there were `first_tokens`;
    failed: requests answered by a status of 500 or more; refused: requests answered by 429 or such a status, by it and
    the error's code; rungs: attempts after the first ones of requests, by step of the retry policy."""

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
    refused: dict[str, int] = {}
    rungs: dict[str, int] = {}

    @classmethod
    def of(cls, points: Sequence[Counts]) -> Counts:
        """The sum of several, which follow each other."""
        firsts = sum(point.first_tokens for point in points)
        waited_s = sum(point.first_tokens * (point.first_token_s or 0.0) for point in points)
        sums: dict[str, Counter[str]] = {name: Counter() for name in ("prompt", "missed", "refused", "rungs")}
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
        )

    @property
    def reused(self) -> int:
        return sum(tokens for source, tokens in self.prompt.items() if source != "computed")

    @property
    def hit_rate(self) -> float | None:
        """None without a prompt."""
        total = sum(self.prompt.values())
        return self.reused / total if total else None


class Transfer(BaseModel):
    """Transfers from one node to another in the last seconds: see State.transfers_s.

    kind: ship (a prompt of this router's requests), copy (of running streams, to who would go on with them) or move (of
    streams whose node drains); both of these are of all routers. seconds: a ship's, on average."""

    kind: str = "ship"
    source: str
    target: str
    transfers: int
    blocks: int
    bytes_per_s: float
    seconds: float | None = None


class Asked(BaseModel):
    """A request, or one sequence of it.

    prefill: empty where the decode node computes the prompt; seconds: since it arrived, until it ended; ago_s: since it
    ended, where it has; rungs: attempts after the first; outcome: running, done, cancelled (its client left), or an
    error's code. id and tenant are empty where they are another tenant's."""

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
    rungs: int
    outcome: str


class Event(BaseModel):
    """A step of the retry policy, with the nodes that are to blame, or what a node did: joined, ready, draining,
    incompatible, role (it has another one), lost."""

    ago_s: float
    kind: str
    nodes: list[str]
    told: str
    request: str
    tenant: str


class Suspect(BaseModel):
    """Node or pair that receives nothing new.

    kind: `node`, `ships` between nodes, or `quarantine` after too many corrupt ships; an empty name stands for all
    nodes. seconds: time left. For how many seconds still."""

    kind: str
    prefill: str
    decode: str
    seconds: float


class State(BaseModel):
    """`registry`: whether it answers; `queued`: requests that wait at the router for their turn; `nodes` are no more
    than are shown, of `nodes_total`; `points` go up to now, `total` counts since the router started; `running` are the
    oldest of `running_total`, `recent` and `events` begin with the latest."""

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
    running: list[Asked]
    running_total: int
    recent: list[Asked]
    events: list[Event]
    suspects: list[Suspect]
