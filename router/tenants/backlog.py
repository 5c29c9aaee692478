"""Backlog: one model's requests that wait in this router, in seconds and nodes, for autoscaling metrics."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from kvferry.placement.capacity import Capacity
from kvferry.protocol.lease import Rates

DRAIN_S = 120.0
"""Time within which the requested nodes should start all waiting requests, in seconds.

It distinguishes a past burst from a lasting load."""
DEFAULT_SEQUENCES = 64
"""Sequences per decode node, until a decode node has been seen."""


class Waiting(NamedTuple):
    """Requests that wait for a slot: their sequences, and prompt tokens to compute.

    `seconds` estimates the time until the last one starts. `ratio` is that of arriving to starting sequences."""

    sequences: int = 0
    prompt: int = 0
    seconds: float = inf
    ratio: float = inf


class UnplacedRequests(Protocol):
    """Requests that no node can take now."""

    @property
    def requests(self) -> int:
        """Return the number of waiting requests."""

    @property
    def tokens(self) -> int:
        """Return the tokens of all waiting requests."""


class Backlog:
    """Backlog of one model's nodes for autoscaling.

    Waiting requests count towards decode nodes in proportion to the occupied sequence slots, and towards prefill nodes
    otherwise, so that only the short pool grows. Without any node both grow. A node's rate and number of sequences
    are remembered from the last nodes seen."""

    def __init__(
        self, waiting: Callable[[], Waiting], unplaced: UnplacedRequests, capacity: Callable[[], Capacity]
    ) -> None:
        self._waiting, self._unplaced, self._capacity = waiting, unplaced, capacity
        self._rate, self._sequences_per_node = Rates().prefill_tokens_per_s, float(DEFAULT_SEQUENCES)

    def prefill_s(self) -> float:
        """Return the waiting prompts in seconds of one prefill node."""
        full = self._occupancy()
        return ((1 - full) * self._waiting().prompt + self._unplaced.tokens) / self._rate

    def decode_nodes(self) -> float:
        """Return how many decode nodes the waiting requests need beyond the existing ones.

        The result may be negative. Full nodes report pressure themselves, and capacity beyond the need of arrivals
        once the queue is empty is subtracted."""
        full, decodes, waiting = self._occupancy(), self._capacity().decodes, self._waiting()
        most = waiting.sequences / self._sequences_per_node
        more = decodes * (waiting.ratio - 1 + waiting.seconds / DRAIN_S) if waiting.sequences and decodes else 0.0
        return full * min(most, more) + self._unplaced.requests / self._sequences_per_node

    def unplaced(self) -> int:
        """Return the number of requests that no node can take."""
        return self._unplaced.requests

    def _occupancy(self) -> float:
        """Update the remembered rate and sequences per node; return the occupied fraction of the sequence slots."""
        now = self._capacity()
        if now.prefills and now.prompt_per_s > 0:
            self._rate = now.prompt_per_s / now.prefills
        if now.decodes and now.sequences:
            self._sequences_per_node = now.sequences / now.decodes
        return min(1.0, now.taken / now.sequences) if now.sequences else 0.0
