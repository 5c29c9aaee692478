"""What follows a failed attempt (DESIGN rule 8):

same prefill again (before any byte, once) → another prefill → local prefill on decode → another decode
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from placement.terms import NodeKey, Placement
from protocol.errors import (
    Cancelled,
    Draining,
    GrantRefused,
    KvferryError,
    NodeLost,
    Overloaded,
)
from protocol.lease import NodeLease
from router.nodes.entry import node_key

MAX_FAILURES = 8
MAX_PREFILL_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt ended without finishing. `node` is the one to blame, as far as the router can tell."""

    attempt: int
    error: KvferryError
    node: NodeLease


@dataclass(slots=True)
class Ladder:
    """The state of one request's retries: which nodes it avoids, which it insists on."""

    excluded: set[NodeKey] = field(default_factory=set)
    pinned: NodeKey | None = None
    local_only: bool = False
    _repeated: bool = False
    _prefill_failures: int = 0
    _failures: int = 0

    def climb(self, failure: Failure, delivered: int, prefills: Collection[NodeKey]) -> str:
        """Decide the next attempt and name its rung. `delivered`: output tokens the client has; `prefills`: live nodes
        that could prefill. Raises the failure's error if no other attempt can help."""
        error, key = failure.error, node_key(failure.node)
        if not error.retryable:
            raise error
        if not isinstance(error, GrantRefused | Overloaded):
            self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise error
        self.pinned = None
        if failure.node.role == "prefill":
            return self._after_prefill(error, key, delivered, prefills)
        self.excluded.add(key)
        return "wait_for_room" if isinstance(error, GrantRefused | Overloaded) else "another_decode"

    def forgive(self) -> None:
        """Nothing else is left: allow again what failed before."""
        self.excluded.clear()

    def _after_prefill(self, error: KvferryError, key: NodeKey, delivered: int, prefills: Collection[NodeKey]) -> str:
        worth_repeating = not isinstance(error, Overloaded | Draining | Cancelled)
        if delivered == 0 and not self._repeated and worth_repeating and key in prefills:
            self._repeated, self.pinned = True, key
            return "same_prefill"
        self.excluded.add(key)
        self._prefill_failures += 1
        if self._prefill_failures < MAX_PREFILL_FAILURES and set(prefills) - self.excluded:
            return "another_prefill"
        self.local_only = True
        return "local_prefill"


def blamed(error: KvferryError, reporter: NodeLease, placement: Placement) -> NodeLease:
    """Who caused what `reporter` reports. A refused grant is the decode node's doing; a decode node that reports a lost
    peer or transfer means its prefill node."""
    if reporter.role == "prefill" and isinstance(error, GrantRefused) and placement.decode:
        return placement.decode
    from_peer = isinstance(error, NodeLost) or error.code == "transfer_failed"
    if reporter.role == "decode" and from_peer and placement.prefill:
        return placement.prefill
    return reporter
