"""Chooses the new role of an elastic node from the load of a model's prefill and decode pools.

The measures are those of autoscalers: the backlog of prompts in seconds of one node, and the number of decode nodes
that the streams would fill. A pool with too few nodes gets one if the other pool would have enough without
it. The thresholds for "too few" and "enough" are more than one node apart, so that the same load does not move the node
back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.lease import NodeLease

FULL, SPARE = 0.9, 0.6
"""Shares of decode capacity in use at which decode nodes are too few, and at which they suffice."""
BEHIND_S, CAUGHT_UP_S = 2.0, 0.5
"""Backlog per prefill node, in seconds, at which prefill nodes are too few, and at which they suffice."""


@dataclass(frozen=True, slots=True)
class Demands:
    """Total demand on a model's nodes.

    backlog_s  time one node needs for the prompts that wait, on nodes and in the router
    pressure   decode nodes needed for the streams and for requests that wait for a slot
    """

    backlog_s: float
    pressure: float


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a node's role. rest_s: minimum number of seconds since the last change of the model's roles."""

    node: NodeLease
    role: str
    rest_s: float


def backlog_s(leases: Sequence[NodeLease]) -> float:
    """Return the backlog of prompts on these nodes, in seconds."""
    return sum(lease.load.waiting_tokens / max(1.0, lease.rates.prefill_tokens_per_s) for lease in leases)


def role_change(leases: Sequence[NodeLease], demands: Demands, rest_s: float) -> Change | None:
    """Return the useful role change for the nodes of one model, or None.

    None while a change is in progress or a node is leaving, and for `rest_s` after the last change, unless no decode
    node remains."""
    staying = [lease for lease in leases if lease.state == "ready" and not lease.leaving]
    prefills = [lease for lease in staying if lease.role == "prefill"]
    decodes = [lease for lease in staying if lease.role == "decode"]
    if len(staying) < len(leases):
        return None
    rest_s = rest_s if decodes else 0.0
    if any(0 < lease.role_s < rest_s for lease in staying):
        return None
    if _needs_decode(len(prefills), len(decodes), demands):
        idle = [lease for lease in prefills if not (lease.load.waiting_requests or lease.load.running_requests)]
        return _change(idle, "decode", rest_s)
    if _needs_prefill(len(prefills), len(decodes), demands):
        return _change(decodes, "prefill", rest_s)
    return None


def _needs_decode(prefills: int, decodes: int, demands: Demands) -> bool:
    """Return whether decode nodes are too few and a prefill node can be spared."""
    too_few = demands.pressure >= FULL * decodes and demands.pressure > 0
    return too_few and prefills > 1 and demands.backlog_s <= CAUGHT_UP_S * (prefills - 1)


def _needs_prefill(prefills: int, decodes: int, demands: Demands) -> bool:
    """Return whether prefill nodes are too few and a decode node can be spared."""
    too_few = demands.backlog_s >= BEHIND_S * max(1, prefills)
    return too_few and decodes > 1 and demands.pressure <= SPARE * (decodes - 1)


def _change(nodes: Sequence[NodeLease], role: str, rest_s: float) -> Change | None:
    """Return a change of the least busy elastic node, chosen so that all routers find the same one."""
    elastic = [lease for lease in nodes if lease.elastic]
    if not elastic:
        return None
    least = min(elastic, key=lambda lease: (lease.pressure, lease.load.running_requests, lease.node_id))
    return Change(least, role, rest_s)
