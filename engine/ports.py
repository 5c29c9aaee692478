"""Protocols that the engine needs from outside; the worker connects them to implementations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol

REQUEST = "request"
"""A running request reads or writes the block."""
GRANT = "grant"
"""Reserved on the decode side for a ship: receives are posted into it."""
SHIP = "ship"
"""The prefill side sends from it."""
QUIESCE = "quiesce"
"""A failed ship: the link may still touch it until it reports quiet."""
CANARY = "canary"
"""What a ship brought, and what is computed anew to compare it with (see engine.canary)."""


class Holds(Protocol):
    """The ledger of holds: the only authority on whether a block may be reused. Owned by the engine thread."""

    def hold(self, owner: Hashable, reason: str, block_ids: Iterable[int]) -> None:
        """The owner keeps these blocks for this reason."""

    def release(self, owner: Hashable, reason: str, block_ids: Iterable[int] | None = None) -> list[int]:
        """Give up holds; returns the blocks, in the order given, that nobody holds any more."""

    def held(self, block_id: int) -> bool:
        """Return whether anybody holds the block."""

    def move(self, owner: Hashable, old_reason: str, new_reason: str) -> None:
        """Keep all of an owner's blocks, for another reason."""

    def owners(self) -> Iterator[tuple[str, Hashable]]:
        """(reason, owner) of all holds."""

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""

    def audit(self) -> Iterator[None]:
        """Assert that the books agree with themselves, in pieces between which they may be used."""
