"""RetryPolicy: after a failed attempt, decides which nodes to avoid and what kind of attempt comes next.

The steps are: same prefill again (once, before any byte), another prefill or pair, local prefill on decode, another
decode (rule 8 of docs/design/rules.md)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.placement.types import NodeKey, Pair
from kvferry.protocol.errors import (
    Cancelled,
    Draining,
    GrantRefused,
    KvferryError,
    NodeLost,
    Overloaded,
    StepFailed,
)
from kvferry.router.dispatch.failures import Failure
from kvferry.router.nodes.node_entry import node_key

MAX_FAILURES = 8
"""Number of failures without progress after which the request fails."""
MAX_PREFILL_FAILURES = 3
"""Number of prefill failures after which the decode node computes the prompt."""
MAX_STEP_FAILURES = 2
"""Number of failed steps after which the request fails, since it would break a third node's step too."""


@dataclass(slots=True)
class RetryPolicy:
    """State of one request's retries since its last progress: nodes and pairs to avoid, and constraints.

    Nodes that failed before the last progress are left to the circuit breakers, which all requests share."""

    excluded: frozenset[NodeKey] = frozenset()
    broken: frozenset[Pair] = frozenset()
    pinned: NodeKey | None = None
    local_only: bool = False
    _repeated: bool = False
    _prefill_failures: int = 0
    _failures: int = 0
    _step_failures: int = 0
    _delivered: int = 0

    def next_step(self, failure: Failure, delivered: int, prefills: Collection[NodeKey]) -> str:
        """Decide the next attempt and return the name of its step.

        `delivered` counts the output tokens that the client has; `prefills` are the live nodes that could prefill.
        Raises the failure's error if no other attempt can help."""
        error, *keys = failure.error, *map(node_key, failure.at_fault)
        if not error.retryable:
            raise error
        if delivered > self._delivered:
            self._reset(delivered)
        if not isinstance(error, GrantRefused | Overloaded):
            self._failures += 1
        self._step_failures += isinstance(error, StepFailed)
        if self._failures >= MAX_FAILURES or self._step_failures >= MAX_STEP_FAILURES:
            raise error
        self.pinned = None
        if len(keys) == 2:
            return self._after_pair(keys[0], keys[1])
        if failure.at_fault[0].role == "prefill":
            return self._after_prefill(error, keys[0], delivered, prefills)
        self.excluded |= {keys[0]}
        if isinstance(error, Draining) and delivered:
            return "drain_timeout"
        return "wait_for_room" if isinstance(error, GrantRefused | Overloaded) else "another_decode"

    def clear_avoided(self) -> None:
        """Allow all failed nodes and pairs again, since nothing else is left."""
        self.excluded, self.broken = frozenset(), frozenset()

    def _reset(self, delivered: int) -> None:
        self.clear_avoided()
        self.local_only = False
        self._prefill_failures = self._failures = self._step_failures = 0
        self._delivered = delivered

    def _after_pair(self, prefill: NodeKey, decode: NodeKey) -> str:
        """Avoid the pair, since each node may work with another; after repeated failures prefill on the decode node."""
        self.broken |= {(prefill, decode)}
        self._prefill_failures += 1
        if self._prefill_failures < MAX_PREFILL_FAILURES:
            return "another_pair"
        self.local_only = True
        return "local_prefill"

    def _after_prefill(self, error: KvferryError, key: NodeKey, delivered: int, prefills: Collection[NodeKey]) -> str:
        may_succeed = not isinstance(error, Overloaded | Draining | Cancelled | NodeLost | StepFailed)
        if delivered == 0 and not self._repeated and may_succeed and key in prefills:
            self._repeated, self.pinned = True, key
            return "same_prefill"
        self.excluded |= {key}
        self._prefill_failures += 1
        if self._prefill_failures < MAX_PREFILL_FAILURES and set(prefills) - self.excluded:
            return "another_prefill"
        self.local_only = True
        return "local_prefill"
