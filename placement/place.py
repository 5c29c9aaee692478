"""Where an attempt goes: the (prefill, decode) pair with the least cost, everything in seconds (DESIGN section 5).

    remote(P, D) = wait(P) + uncached(P)/rate(P) + exposed_bytes/bandwidth(P→D) + wait(D)
    local(D)     = wait(D) + uncached(D)/rate(D) + harm to the running streams of D

Pure: the same arguments give the same placement. Reuse only ever enters as seconds of computing and shipping saved, so
a node that holds a prefix loses it as soon as its queue costs more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.costs import (
    HANDOFF_S,
    Demand,
    NodeView,
    cached_len,
    compute_s,
    demanded_blocks,
    exposed_s,
    fits,
    harm_s,
    queue_s,
    uncached_len,
    wait_s,
)
from protocol.errors import ContextLengthExceeded, NoNodes, Overloaded
from protocol.messages import NodeLease

BACKLOG = 4.0
"""A decode node takes requests until the blocks in use and asked for reach this multiple of its pool."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice: prefill None means prefilled on decode, decode None means finished on prefill. `cached_len`: tokens
    expected to be reused where the prompt is computed. `first_token_s`: expected seconds to the first token."""

    prefill: NodeLease | None
    decode: NodeLease | None
    cached_len: int
    cost_s: float
    first_token_s: float

    @property
    def kind(self) -> str:
        return "remote" if self.prefill else "local"


def place(demand: Demand, nodes: Sequence[NodeView], turn: int = 0) -> Placement:
    """The cheapest placement; equal ones take turns by `turn`.

    Raises NoNodes without a node that may be used, ContextLengthExceeded when the request fits into no pool, Overloaded
    (with retry_after) when every decode node that could hold it is beyond its capacity.
    """
    usable = [node for node in nodes if node.lease.state == "ready" and node.key not in demand.excluded]
    decodes = [node for node in usable if node.lease.role == "decode"]
    prefills = [node for node in usable if node.lease.role == "prefill" and not demand.local_only]
    prefills = [node for node in prefills if node.key == demand.pinned] or prefills
    prefills = [node for node in prefills if fits(demand, node)]
    options: list[Placement] = []
    if demand.prompt_only:
        options = [_alone(demand, node) for node in prefills]
    if not options:
        decodes = _with_room(demand, decodes)
        local = [_local(demand, node) for node in decodes]
        short = [
            option
            for option, node in zip(local, decodes, strict=True)
            if uncached_len(demand, node) <= demand.local_tokens
        ]
        options = short or local
        if not short and not demand.prompt_only:
            options += _best_remote(demand, prefills, decodes)
    ranks = _Ranks(usable, turn)
    return min(options, key=lambda option: (option.cost_s, ranks(option.decode), ranks(option.prefill)))


def _alone(demand: Demand, node: NodeView) -> Placement:
    first_s = queue_s(node) + compute_s(node, demand)
    return Placement(node.lease, None, cached_len(demand, node), first_s, first_s)


def _local(demand: Demand, node: NodeView) -> Placement:
    first_s = queue_s(node) + wait_s(node, demand) + compute_s(node, demand)
    return Placement(None, node.lease, cached_len(demand, node), first_s + harm_s(node, demand), first_s)


def _best_remote(demand: Demand, prefills: Sequence[NodeView], decodes: Sequence[NodeView]) -> list[Placement]:
    """The cheapest pairs (more than one when equal). Pairs are tried from the cheapest halves up, and those whose
    halves alone cost more than the best pair found are not tried."""
    firsts = sorted(((queue_s(node) + compute_s(node, demand), i) for i, node in enumerate(prefills)))
    waits = sorted(((wait_s(node, demand) + HANDOFF_S, i) for i, node in enumerate(decodes)))
    best: list[Placement] = []
    for first_s, p in firsts:
        for decode_s, d in waits:
            if best and first_s + decode_s > best[0].cost_s:
                break
            cost = first_s + decode_s + exposed_s(prefills[p], decodes[d], demand)
            if not best or cost <= best[0].cost_s:
                best = [option for option in best if option.cost_s == cost]
                cached = cached_len(demand, prefills[p])
                best.append(Placement(prefills[p].lease, decodes[d].lease, cached, cost, first_s))
    return best


def _with_room(demand: Demand, decodes: Sequence[NodeView]) -> list[NodeView]:
    if not decodes:
        raise NoNodes("no decode node can take the request")
    fitting = [node for node in decodes if fits(demand, node)]
    if not fitting:
        largest = max(node.lease.load.total_blocks * node.lease.block_size for node in decodes)
        raise ContextLengthExceeded(
            f"the request needs KV of {demand.total_len + 1} tokens; the maximum context length that fits into a "
            f"decode node's memory is {largest}"
        )
    with_room = [
        node for node in fitting if demanded_blocks(demand, node) <= BACKLOG * (node.lease.load.total_blocks or 1e12)
    ]
    if not with_room:
        retry_after = min(max(min(wait_s(node, demand) for node in fitting), 1.0), 30.0)
        raise Overloaded("every decode node is full", retry_after=retry_after)
    return with_room


class _Ranks:
    """Place of a node among equals: by id, rotated by `turn`."""

    def __init__(self, nodes: Sequence[NodeView], turn: int) -> None:
        self._order: dict[str, int] = {}
        for role in ("prefill", "decode"):
            ids = sorted(node.lease.node_id for node in nodes if node.lease.role == role)
            self._order.update(_rotated(ids, turn))

    def __call__(self, lease: NodeLease | None) -> int:
        return -1 if lease is None else self._order[lease.node_id]


def _rotated(ids: Sequence[str], turn: int) -> Iterator[tuple[str, int]]:
    for place_, node_id in enumerate(ids):
        yield node_id, (place_ - turn) % len(ids)
