"""Choice of the role that an elastic node should have, from the load of a model's pools.

Both pools are measured as autoscalers measure them: seconds of one node for the prompts that wait, and decode nodes
that the streams would fill. A pool that is short of nodes is given one while the other would have enough without it.
Between "short" and "enough" lies more than one node: what was given is not asked back for the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.lease import NodeLease

FULL, ROOMY = 0.9, 0.6
"""Of the decode nodes that there are: a share that makes them too few, and one that leaves room for what comes."""
BEHIND_S, CAUGHT_UP_S = 2.0, 0.5
"""By which prefill nodes are behind: too few, and enough."""


@dataclass(frozen=True, slots=True)
class Demands:
    """Total demand on a model's nodes.

    backlog_s: seconds of one node for the prompts that wait, at nodes and in the router; pressure: decode nodes for its
    streams and what waits for a seat."""

    backlog_s: float
    pressure: float


@dataclass(frozen=True, slots=True)
class Change:
    """A node that should take a role; rest_s: how long its model's roles must have been as they are."""

    node: NodeLease
    role: str
    rest_s: float


def backlog_s(leases: Sequence[NodeLease]) -> float:
    """Return the backlog of prompts at these nodes, in seconds."""
    return sum(lease.load.waiting_tokens / max(1.0, lease.rates.prefill_tokens_per_s) for lease in leases)


def wanted(leases: Sequence[NodeLease], asked: Demands, rest_s: float) -> Change | None:
    """The change that would help the nodes of one model, if any.

    None while one is under way or a node leaves, and for `rest_s` after the last one, unless nobody is left to decode.
    """
    staying = [lease for lease in leases if lease.state == "ready" and not lease.leaving]
    prefills = [lease for lease in staying if lease.role == "prefill"]
    decodes = [lease for lease in staying if lease.role == "decode"]
    if len(staying) < len(leases):
        return None
    rest_s = rest_s if decodes else 0.0
    if any(0 < lease.role_s < rest_s for lease in staying):
        return None
    if _wants_decode(len(prefills), len(decodes), asked):
        idle = [lease for lease in prefills if not (lease.load.waiting_requests or lease.load.running_requests)]
        return _change(idle, "decode", rest_s)
    if _wants_prefill(len(prefills), len(decodes), asked):
        return _change(decodes, "prefill", rest_s)
    return None


def _wants_decode(prefills: int, decodes: int, asked: Demands) -> bool:
    """And a prefill node can be spared."""
    short = asked.pressure >= FULL * decodes and asked.pressure > 0
    return short and prefills > 1 and asked.backlog_s <= CAUGHT_UP_S * (prefills - 1)


def _wants_prefill(prefills: int, decodes: int, asked: Demands) -> bool:
    """And a decode node can be spared."""
    short = asked.backlog_s >= BEHIND_S * max(1, prefills)
    return short and decodes > 1 and asked.pressure <= ROOMY * (decodes - 1)


def _change(nodes: Sequence[NodeLease], role: str, rest_s: float) -> Change | None:
    """Of the node with least to do: all routers find the same one."""
    able = [lease for lease in nodes if lease.elastic]
    if not able:
        return None
    least = min(able, key=lambda lease: (lease.pressure, lease.load.running_requests, lease.node_id))
    return Change(least, role, rest_s)
