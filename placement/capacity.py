"""Capacity of nodes from their leases: concurrent sequences, prompt rate, and nodes by role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.protocol.lease import NodeLease


@dataclass(frozen=True, slots=True)
class Capacity:
    """Total capacity of some nodes.

    sequences     sequences that can decode at the same time; 0: unknown
    prompt_per_s  prompt tokens computed per second
    decodes       decode nodes
    prefills      nodes that compute prompts
    taken         sequences that run or have a grant
    """

    sequences: int = 0
    prompt_per_s: float = 0.0
    decodes: int = 0
    prefills: int = 0
    taken: int = 0


def capacity(leases: Iterable[NodeLease]) -> Capacity:
    """Return the capacity of the ready nodes.

    Prefill nodes compute prompts, and so do decode nodes if no prefill node shares their fingerprint. If one decode
    node does not report its limit of sequences, the sum is unknown."""
    ready = [lease for lease in leases if lease.state == "ready"]
    decodes = [lease for lease in ready if lease.role == "decode"]
    helped = {lease.fingerprint for lease in ready if lease.role == "prefill"}
    prefills = [lease for lease in ready if lease.role == "prefill" or lease.fingerprint not in helped]
    known = all(lease.max_num_seqs for lease in decodes)
    return Capacity(
        sum(lease.max_num_seqs for lease in decodes) if known else 0,
        sum(lease.rates.prefill_tokens_per_s for lease in prefills),
        len(decodes),
        len(prefills),
        sum(lease.load.running_requests + lease.load.open_grants for lease in decodes),
    )
