"""Capacity of nodes: how many requests they take at once, from their leases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.protocol.lease import NodeLease


@dataclass(frozen=True, slots=True)
class Capacity:
    """Total capacity of nodes.

    Sequences that decode at once, prompt tokens computed in a second (0: not known), decode nodes, nodes that compute
    prompts, and seats of sequences that are taken. Decode nodes, nodes that compute prompts, and seats of sequences
    that are taken."""

    sequences: int = 0
    prompt_per_s: float = 0.0
    decodes: int = 0
    prefills: int = 0
    taken: int = 0


def capacity(leases: Iterable[NodeLease]) -> Capacity:
    """Return the capacity of the ready nodes.

    Prompts are computed by prefill nodes, and by decode nodes where there are none of them. One decode node that does
    not tell how many it runs leaves the sum unknown."""
    ready = [lease for lease in leases if lease.state == "ready"]
    decodes = [lease for lease in ready if lease.role == "decode"]
    prefills = [lease for lease in ready if lease.role == "prefill"] or decodes
    known = all(lease.max_num_seqs for lease in decodes)
    return Capacity(
        sum(lease.max_num_seqs for lease in decodes) if known else 0,
        sum(lease.rates.prefill_tokens_per_s for lease in prefills),
        len(decodes),
        len(prefills),
        sum(lease.load.running_requests + lease.load.open_grants for lease in decodes),
    )
