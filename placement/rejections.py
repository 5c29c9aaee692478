"""Errors for requests that cannot be placed: no nodes, full, too long, too late; with the time to retry after."""

from __future__ import annotations

from kvferry.protocol.errors import ContextLengthExceeded, NoNodes, Overloaded

NODES_S = 2.0
"""Seconds until routers know a running node: its lease is written every second and read twice a second."""
RETRY_S = (1.0, 30.0)
"""Minimum and maximum retry_after, in seconds."""


class TargetMissed(Overloaded):
    """No node can meet the request's deadline or targets now: waiting would not help."""


def no_nodes(model: str) -> NoNodes:
    """Return the error for a model without a usable decode node."""
    return NoNodes(f"the model {model!r} has no decode node at present that can take the request", retry_after=NODES_S)


def no_compatible_nodes(model: str) -> NoNodes:
    """Return the error for a stream that began on nodes of a version that no live node has."""
    return NoNodes(
        f"no live node has the version that began this answer of the model {model!r}; nodes of other versions do not "
        "continue it, since they would give other tokens",
        retry_after=NODES_S,
    )


def too_long(tokens: int, largest: int) -> ContextLengthExceeded:
    """Return the error for a request that no pool can hold. largest: tokens of the largest pool."""
    return ContextLengthExceeded(
        f"the request needs KV of {tokens} tokens; the maximum context length that fits into the memory of a "
        "decode node is "
        f"{largest}"
    )


def full(drained_s: float) -> Overloaded:
    """Return the error for full decode nodes. drained_s: seconds until enough blocks are freed."""
    return Overloaded("every decode node is full", retry_after=min(max(drained_s, RETRY_S[0]), RETRY_S[1]))


def too_slow(until_s: float) -> TargetMissed:
    """Return the error for a stream that no node can run within its target. until_s: until enough streams ended."""
    return TargetMissed(
        "every decode node runs as many streams as it can without exceeding the target of the time between tokens",
        retry_after=min(max(until_s, RETRY_S[0]), RETRY_S[1]),
    )


def too_late(by_s: float) -> TargetMissed:
    """Return the error for a request that would miss its deadline or target. by_s: seconds beyond it."""
    return TargetMissed(
        "the queues are so long that this request would not start before its deadline or its target",
        retry_after=min(max(by_s, RETRY_S[0]), RETRY_S[1]),
    )
