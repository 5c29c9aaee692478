"""Mistakes that copies of streams might have."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from kvferry.engine.replication import Replicas
from tests.virtual.mistake import Mutant, mutant


@mutant("instead of")
def copy_lands_at_once() -> Mutant:
    """What a buddy is to keep is findable before its blocks are there."""

    def reserve(copies: Replicas, grant: Any, hashes: Any, most: int) -> tuple[int, list[int]]:
        first, block_ids = real(copies, grant, hashes, most)
        _, chain, _ = copies._landing[grant]
        for index in range(first, len(chain)):
            copies._pool.register([], chain[index], hashes[index], chain[index - 1] if index else None)
        return first, block_ids

    real = Replicas.reserve
    return patch.object(Replicas, "reserve", reserve)


@mutant("is sent, but not held")
def copy_is_not_lent() -> Mutant:
    """Blocks of a copy are taken anew while they are being sent."""

    def hold_copy(copies: Replicas, transfer: int, chain: Any, first: int) -> Any:
        transfer_holds = real(copies, transfer, chain, first)
        copies.returned(transfer)
        return transfer_holds

    real = Replicas.hold_copy
    return patch.object(Replicas, "hold_copy", hold_copy)
