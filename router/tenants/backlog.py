"""Backlog of one model's requests in this router, in the units that autoscaling uses."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from kvferry.placement.capacity import Capacity
from kvferry.protocol.lease import Rates

DRAIN_S = 120.0
"""In so long the nodes that are asked for shall have begun all that waits: what queued is not what comes."""
SEATS = 64
"""Of a decode node, as long as none was ever seen."""


class Waiting(NamedTuple):
    """Requests that wait for a slot: sequences, and prompt tokens to compute.

    seconds: until the last one's turn comes, as far as that can be said; ratio: of sequences that come to those that
    begin."""

    sequences: int = 0
    prompt: int = 0
    seconds: float = inf
    ratio: float = inf


class Holds(Protocol):
    """Requests that wait for a node, since none can take them."""

    @property
    def requests(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class Backlog:
    """Backlog of one model's nodes for autoscaling.

    Requests that wait for a slot count for seats as far as these are taken, and for prompts as far as they are not:
    only the pool that is short should grow. Where there is no node at all, both should. What a node is, its rate and
    its seats, is remembered from the last ones that were seen."""

    def __init__(self, waiting: Callable[[], Waiting], held: Holds, capacity: Callable[[], Capacity]) -> None:
        self._waiting, self._held, self._capacity = waiting, held, capacity
        self._rate, self._seats = Rates().prefill_tokens_per_s, float(SEATS)

    def prefill_s(self) -> float:
        """Seconds of one node for the prompts."""
        full = self._look()
        return ((1 - full) * self._waiting().prompt + self._held.tokens) / self._rate

    def decode_nodes(self) -> float:
        """Nodes for them beside those that there are.

        Full nodes of which fewer would be enough for what comes, once the queue is gone, are counted back: they say
        themselves that they are full."""
        full, decodes, waiting = self._look(), self._capacity().decodes, self._waiting()
        most = waiting.sequences / self._seats
        more = decodes * (waiting.ratio - 1 + waiting.seconds / DRAIN_S) if waiting.sequences and decodes else 0.0
        return full * min(most, more) + self._held.requests / self._seats

    def held(self) -> int:
        """Requests that wait for a node."""
        return self._held.requests

    def _look(self) -> float:
        """Learn from the nodes that are there. Returns the share of their seats that is taken."""
        now = self._capacity()
        if now.prefills and now.prompt_per_s > 0:
            self._rate = now.prompt_per_s / now.prefills
        if now.decodes and now.sequences:
            self._seats = now.sequences / now.decodes
        return min(1.0, now.taken / now.sequences) if now.sequences else 0.0
