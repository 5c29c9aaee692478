"""Where an attempt goes: the (prefill, decode) pair with the least cost, everything in seconds (DESIGN, Placement).

    remote(P, D) = wait(P) + uncached(P)/rate(P) + exposed_bytes/bandwidth(P→D) + wait(D)
    local(D)     = wait(D) + uncached(D)/rate(D) + harm to the running streams of D

Pure: the same arguments give the same placement. Reuse only ever enters as seconds of computing and shipping saved, so
a node that holds a prefix loses it as soon as its queue costs more than that. Costs and search are in one file because
the search relies on how the costs grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from placement.refusals import full, no_nodes, too_long
from placement.terms import Demand, NodeView, Placement
from protocol.layout import blocks_for

HANDOFF_S = 0.002
"""Grant, commit and acknowledgement of one ship between idle nodes."""
CHUNK_TOKENS = 256
"""The last chunk of a prompt is shipped after its last token was computed, so its bytes are always exposed."""
STREAM_SHARE = 0.05
"""By how much one more running stream stretches a decode step."""
EXPECTED_OUTPUT = 128
"""Tokens a running request is expected to hold its blocks for; used only while a decode node has no room."""
BACKLOG = 4
"""A decode node takes requests until the blocks in use and asked for reach this multiple of its pool."""
UNKNOWN_BLOCKS = 10**12
"""A pool that does not tell its size is no limit."""
SHORTEST_STEP_S = 1e-4
NOISE = 0.2
"""Learned rates of equal machines differ by as much: nodes that count alike are equal within this share of a cost."""


def place(demand: Demand, nodes: Sequence[NodeView]) -> Placement:
    """The cheapest placement; of equal nodes (see NOISE) the one that was not chosen for longest.

    O(n log n) for n nodes, where few decode nodes hold any of the prompt; see `_remote`. Raises NoNodes without a node
    that may be used, ContextLengthExceeded when the request fits into no pool, Overloaded when every decode node that
    could hold it is beyond its capacity; the first and the last with retry_after.
    """
    out = demand.excluded
    usable = [node for node in nodes if node.lease.state == "ready" and not (out and node.key in out)]
    usable.sort(key=attrgetter("placed", "lease.node_id"))
    prefills = _prefills(demand, usable)
    if demand.prompt_only and prefills:
        return _alone(demand, prefills)
    decodes = [(wait_s(node, demand), node) for node in _decodes(demand, usable)]
    short = [(wait, node) for wait, node in decodes if demand.local_tokens >= uncached_len(node, demand)]
    local = _local(demand, short or decodes)
    if short or demand.prompt_only or not prefills:
        return local
    remote = _remote(demand, prefills, decodes)
    return remote if remote.cost_s < local.cost_s else local


def queue_s(node: NodeView) -> float:
    """Seconds until the prompt tokens already queued on the node are computed."""
    return node.waiting_tokens / max(node.lease.rates.prefill_tokens_per_s, 1.0)


def compute_s(node: NodeView, demand: Demand) -> float:
    """Seconds to compute the tokens the node does not hold."""
    return uncached_len(node, demand) / max(node.lease.rates.prefill_tokens_per_s, 1.0)


def exposed_s(blocks: int, last: int, block_s: float, compute_s: float) -> float:
    """Seconds of shipping `blocks` at `block_s` each that computing cannot hide: they travel while later ones are
    computed, except the `last` ones, which the prompt's last chunk fills."""
    return max(blocks * block_s - compute_s, min(blocks, last) * block_s)


def wait_s(node: NodeView, demand: Demand) -> float:
    """Seconds before a decode node starts on a request that is ready to run there: the step under way, stretched by the
    streams beside it, and, when the pool is full, the time until enough blocks come back."""
    wait = node.lease.rates.step_s * (1 + STREAM_SHARE * node.streams)
    missing = missing_blocks(node, demand)
    return wait + missing / freed_per_s(node) if missing > 0 else wait


def harm_s(node: NodeView, compute_s: float) -> float:
    """Seconds that computing the prompt takes from the streams of a decode node, all together. One stream is counted
    that is not there yet: an idle decode node is kept free for the next one."""
    return (node.streams + 1) * compute_s


def cached_len(node: NodeView, demand: Demand) -> int:
    """Whole blocks only, unless it forks from a request there, and at least one token is always computed."""
    if demand.beside is not None and node.key == demand.beside:
        return demand.total_len - 1
    size = node.lease.block_size
    return min(node.cached_len, demand.total_len - 1) // size * size if node.cached_len else 0


def uncached_len(node: NodeView, demand: Demand) -> int:
    return demand.total_len - cached_len(node, demand)


def shipped_blocks(node: NodeView, demand: Demand) -> int:
    """Blocks of the prompt that a decode node does not hold."""
    return blocks_for(demand.total_len, node.lease.block_size) - cached_len(node, demand) // node.lease.block_size


def new_blocks(node: NodeView, demand: Demand) -> int:
    """Blocks the request adds to a decode node's pool to run there."""
    return blocks_for(demand.total_len + 1, node.lease.block_size) - cached_len(node, demand) // node.lease.block_size


def missing_blocks(node: NodeView, demand: Demand) -> int:
    """Blocks that must come back before the request can run."""
    load, size = node.lease.load, node.lease.block_size
    needed = blocks_for(demand.total_len + 1, size)
    free = load.free_blocks - max(0, node.pending_blocks - load.granted_blocks)
    if needed <= free or load.total_blocks == 0:
        return 0
    held = cached_len(node, demand) // size
    return needed - held - free - max(0, load.cached_blocks - held)


def fits(node: NodeView, demand: Demand) -> bool:
    total = node.lease.load.total_blocks
    return total == 0 or blocks_for(demand.total_len + 1, node.lease.block_size) <= total


def spare_blocks(node: NodeView) -> int:
    """Blocks that may still be asked of a decode node; below zero when it has been asked for more than it takes."""
    load = node.lease.load
    return BACKLOG * (load.total_blocks or UNKNOWN_BLOCKS) - load.active_blocks - node.pending_blocks


def freed_per_s(node: NodeView) -> float:
    """Blocks that a decode node's running requests give back in a second."""
    return max(1, node.lease.load.active_blocks) / (EXPECTED_OUTPUT * max(node.lease.rates.step_s, SHORTEST_STEP_S))


def _prefills(demand: Demand, usable: Iterable[NodeView]) -> list[NodeView]:
    if demand.local_only:
        return []
    prefills = [node for node in usable if node.lease.role == "prefill"]
    if demand.pinned:
        prefills = [node for node in prefills if node.key == demand.pinned] or prefills
    return [node for node in prefills if fits(node, demand)]


def _decodes(demand: Demand, usable: Iterable[NodeView]) -> list[NodeView]:
    """Those with room. Raises what `place` raises."""
    decodes = [node for node in usable if node.lease.role == "decode"]
    if not decodes:
        raise no_nodes(demand.model)
    fitting = [node for node in decodes if fits(node, demand)]
    if not fitting:
        largest = max(node.lease.load.total_blocks * node.lease.block_size for node in decodes)
        raise too_long(demand.total_len + 1, largest)
    roomy = [node for node in fitting if new_blocks(node, demand) <= spare_blocks(node)]
    if not roomy:
        raise full(min((new_blocks(node, demand) - spare_blocks(node)) / freed_per_s(node) for node in fitting))
    return roomy


def _alone(demand: Demand, prefills: Iterable[NodeView]) -> Placement:
    """Of nodes in turn order, like all below."""
    first_s, node = _cheapest((queue_s(node) + compute_s(node, demand), node) for node in prefills)
    return Placement(node.lease, None, cached_len(node, demand), first_s, first_s)


def _local(demand: Demand, decodes: Iterable[tuple[float, NodeView]]) -> Placement:
    """`decodes` with their wait."""

    def cost_s(node: NodeView, wait: float) -> float:
        seconds = compute_s(node, demand)
        return queue_s(node) + wait + seconds + harm_s(node, seconds)

    cost, node = _cheapest((cost_s(node, wait), node) for wait, node in decodes)
    return Placement(None, node.lease, cached_len(node, demand), cost, cost - harm_s(node, compute_s(node, demand)))


def _remote(demand: Demand, prefills: Iterable[NodeView], decodes: Iterable[tuple[float, NodeView]]) -> Placement:
    """The cheapest pair, or one that equals it half by half. `decodes` with their wait."""
    firsts = [(_computing(node, demand), node) for node in prefills]
    waits = [(wait + HANDOFF_S, shipped_blocks(node, demand), node) for wait, node in decodes]
    least_s, prefill, (decode_s, blocks, decode) = _cheapest_pair(firsts, waits)
    _, prefill = _whose_turn(((_pair_s(first, decode_s, blocks), node) for first, node in firsts), prefill, least_s)
    computing = _computing(prefill, demand)
    costs = ((_pair_s(computing, decode_s, blocks), node) for decode_s, blocks, node in waits)
    cost_s, decode = _whose_turn(costs, decode, least_s)
    return Placement(prefill.lease, decode.lease, cached_len(prefill, demand), cost_s, computing.first_s)


def _cheapest_pair(
    firsts: Iterable[tuple[Computing, NodeView]], waits: Iterable[tuple[float, int, NodeView]]
) -> tuple[float, NodeView, tuple[float, int, NodeView]]:
    """Its cost and halves, as if every pair had been tried.

    A decode node matters by its wait and the blocks it lacks. Whoever is beaten or equalled in both is left out: more
    blocks never cost less. Without any of the prompt's blocks on decode one node is left, otherwise no more than there
    are different lengths held. Each of these f is paired with prefill nodes from the soonest first token on, until the
    two halves alone cost more than the best pair. O(p log p + d log d + f * p) for p prefill and d decode nodes.
    """
    firsts = sorted(firsts, key=itemgetter(0))
    best: tuple[float, NodeView, tuple[float, int, NodeView]] | None = None
    fewest = inf
    for wait in sorted(waits, key=itemgetter(0, 1)):
        decode_s, blocks, _ = wait
        if blocks >= fewest:
            continue
        fewest = blocks
        for computing, prefill in firsts:
            if best and computing.first_s + decode_s > best[0]:
                break
            cost_s = _pair_s(computing, decode_s, blocks)
            if best is None or cost_s < best[0]:
                best = (cost_s, prefill, wait)
    assert best
    return best


def _cheapest(costs: Iterable[tuple[float, NodeView]]) -> tuple[float, NodeView]:
    least_s, cheapest = min(known := list(costs), key=itemgetter(0))
    return _whose_turn(known, cheapest, least_s)


def _whose_turn(costs: Iterable[tuple[float, NodeView]], cheapest: NodeView, least_s: float) -> tuple[float, NodeView]:
    """The first, in turn order, that equals the cheapest: alike in what is counted, near in what is learned."""
    counted = attrgetter("cached_len", "waiting_tokens", "streams", "pending_blocks")
    alike = ((cost_s, node) for cost_s, node in costs if counted(node) == counted(cheapest))
    return next((cost_s, node) for cost_s, node in alike if cost_s <= least_s * (1 + NOISE))


class Computing(NamedTuple):
    """Of a prefill node: seconds to the first token, to ship a block, and of computing; blocks of the last chunk."""

    first_s: float
    block_s: float
    compute_s: float
    last: int


def _computing(node: NodeView, demand: Demand) -> Computing:
    lease, seconds = node.lease, compute_s(node, demand)
    block_s = lease.block_bytes / max(lease.rates.ship_bytes_per_s, 1.0)
    return Computing(queue_s(node) + seconds, block_s, seconds, blocks_for(CHUNK_TOKENS, lease.block_size))


def _pair_s(computing: Computing, decode_s: float, blocks: int) -> float:
    return computing.first_s + decode_s + exposed_s(blocks, computing.last, computing.block_s, computing.compute_s)
