"""What tests ask of a ledger's books beyond what the engine needs."""

from __future__ import annotations

from collections.abc import Hashable

from kvferry.engine.ledger import Ledger


def count(ledger: Ledger, block_id: int) -> int:
    """Number of holds on the block."""
    return ledger._counts[block_id]


def blocks(ledger: Ledger, owner: Hashable, reason: str) -> list[int]:
    """Blocks that the owner holds for the reason, in the order in which they were held."""
    return list(ledger._pages.get(reason, {}).get(owner, {}))


def owners(ledger: Ledger, reason: str) -> list[Hashable]:
    """Owners with at least one hold for the reason."""
    return list(ledger._pages.get(reason, {}))


def holds_of(ledger: Ledger, block_id: int) -> list[tuple[Hashable, str]]:
    """(owner, reason) of every hold on the block."""
    return [(owner, reason) for reason, book in ledger._pages.items() for owner, ids in book.items() if block_id in ids]
