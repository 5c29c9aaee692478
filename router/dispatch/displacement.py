"""Displacement: preempts patient requests (batch, flex) for those with latency targets; they wait in one queue.

Batch rows, background responses and the tier `flex` are patient. While requests with targets are in flight, patient
ones start only where they delay none of those, one at a time in the order in which they came or were preempted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Protocol

from kvferry.placement.stream_targets import streams_over
from kvferry.placement.types import OVERTAKEN, Demand, NodeKey, Placement
from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.model_nodes import FingerprintGroup, holds

MAX_DISPLACED = 64
"""Maximum number of patient requests that one request preempts."""


class PatientRequest(Protocol):
    """Patient request that runs on nodes."""

    @property
    def uncomputed(self) -> int:
        """Return the prompt tokens that its node computes first; 0 once it has a token of this attempt."""

    def preempt(self) -> None:
        """Leave the nodes; the request continues later, after its delivered tokens."""

    def retry(self) -> None:
        """Try again to find nodes, since no other request waits before this one."""


class Displacement:
    """Requests of one model that have targets, and patient ones, among those that this router placed.

    room: capacity of the model's nodes."""

    def __init__(self, room: CapacitySummary) -> None:
        self._room = room
        self._targets: dict[object, float] = {}
        self._patient: dict[NodeKey, dict[PatientRequest, None]] = {}
        self._nodes: dict[PatientRequest, Collection[NodeKey]] = {}
        self._waiting: dict[PatientRequest, None] = {}

    def has_target(self, request: object, itl_s: float) -> None:
        """Record a request with targets, until `end`. itl_s: its target of the time between tokens, maybe infinite."""
        self._targets[request] = itl_s

    def runs(self, request: PatientRequest, nodes: Collection[NodeKey]) -> None:
        """Record the nodes on which a patient request runs now, until `end`."""
        for key in self._nodes.pop(request, ()):
            others = self._patient[key]
            del others[request]
            if not others:
                del self._patient[key]
        if nodes:
            self._nodes[request] = nodes
        for key in nodes:
            self._patient.setdefault(key, {})[request] = None

    def end(self, request: PatientRequest) -> None:
        """Forget a request."""
        self._targets.pop(request, None)
        self.stop_waiting(request)
        if request in self._nodes:
            self.runs(request, ())

    def itl_s(self) -> float | None:
        """Return the shortest target of the time between tokens in flight, maybe infinite; None without targets."""
        return min(self._targets.values()) if self._targets else None

    def may_try(self, request: PatientRequest) -> bool:
        """Return whether no other patient request waits before this one."""
        return not self._waiting or next(iter(self._waiting)) is request

    def wait(self, request: PatientRequest) -> None:
        """Let a patient request wait until no request with targets would be delayed."""
        self._waiting[request] = None

    def waits(self, request: PatientRequest) -> bool:
        """Return whether the request waits because of requests with targets."""
        return request in self._waiting

    def stop_waiting(self, request: PatientRequest) -> None:
        """Let the next request try, since this one no longer waits."""
        if self._waiting and request in self._waiting:
            first = self.may_try(request)
            del self._waiting[request]
            if first and self._waiting:
                next(iter(self._waiting)).retry()

    def displace_streams(self, demand: Demand, groups: Sequence[FingerprintGroup]) -> bool:
        """Preempt streams on the decode node with the fewest to preempt, so that it takes this demand.

        Returns False, and displaces nothing, if that would help on no node."""
        found: list[tuple[float, NodeKey]] = []
        views = self._room.views
        for key, requests in self._patient.items():
            view = views.get(key)
            if view is None or view.role != "decode" or key in demand.excluded or not holds(view.lease, demand.adapter):
                continue
            over = streams_over(view, demand.itl_s)
            if 0 < over <= min(len(requests), MAX_DISPLACED) and any(key in group for group in groups):
                found.append((over, key))
        if not found:
            return False
        over, key = min(found)
        for request in list(self._patient[key])[-int(over) :]:
            request.preempt()
        return True

    def displace_prompts(self, placement: Placement, late_s: float) -> bool:
        """Preempt prompts, the newest first, on the node that would be `late_s` late with the first token.

        Returns False, and displaces nothing, if that would not help."""
        lease = placement.prefill or placement.decode
        if lease is None or late_s == inf:
            return False
        left = late_s * lease.rates.prefill_tokens_per_s / (1 + OVERTAKEN)
        chosen: list[PatientRequest] = []
        for request in reversed(self._patient.get((lease.node_id, lease.epoch), {})):
            if left <= 0 or len(chosen) == MAX_DISPLACED:
                break
            if request.uncomputed:
                chosen.append(request)
                left -= request.uncomputed
        if left > 0:
            return False
        for request in chosen:
            request.preempt()
        return True
