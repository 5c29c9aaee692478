"""Protocols that the engine needs from outside; the worker connects them to implementations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol

REQUEST = "request"
"""Reason: a running request reads or writes the block."""
GRANT = "grant"
"""Reason: reserved on the decode side for a transfer, whose receives are posted into it."""
SHIP = "ship"
"""Reason: the prefill side sends from it."""
QUIESCE = "quiesce"
"""Reason: the link may still touch blocks of a failed transfer until it reports quiet."""
CANARY = "canary"
"""Reason: received blocks under a canary check, and the recomputed ones (see engine.canary)."""


class Holds(Protocol):
    """Ledger of holds: the only authority on whether a block may be reused. Owned by the engine thread."""

    def hold(self, owner: Hashable, reason: str, block_ids: Iterable[int]) -> None:
        """Hold these blocks for the owner and reason."""

    def release(self, owner: Hashable, reason: str, block_ids: Iterable[int] | None = None) -> list[int]:
        """Give up holds; returns the blocks, in the order given, that nobody holds any more."""

    def held(self, block_id: int) -> bool:
        """Return whether anybody holds the block."""

    def move(self, owner: Hashable, old_reason: str, new_reason: str) -> None:
        """Keep all of an owner's blocks, for another reason."""

    def owners(self) -> Iterator[tuple[str, Hashable]]:
        """Yield (reason, owner) of all holds."""

    @property
    def num_held(self) -> int:
        """Number of blocks that are held."""

    def audit(self) -> Iterator[None]:
        """Assert that the counts agree, in pieces between which holds may change."""
