"""Mistakes that fetches might have."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from kvferry.engine.replication import Replicas
from kvferry.worker.fetch_client import PrefixFetcher
from tests.virtual.mistake import Mutant, mutant


@mutant("is sent, but not held")
def given_blocks_are_not_held() -> Mutant:
    """What a node gives is taken anew while it is being sent."""

    def hold_chain(copies: Replicas, transfer: int, block_ids: Any) -> None:
        real(copies, transfer, block_ids)
        copies.returned(transfer)

    real = Replicas.hold_chain
    return patch.object(Replicas, "hold_chain", hold_chain)


@mutant("copies landing|held blocks")
def fetch_that_failed_keeps_its_blocks() -> Mutant:
    """What was granted is not given back."""
    return patch.object(PrefixFetcher, "quiet", lambda fetches, key: None)


@mutant("instead of")
def fetched_before_it_is_here() -> Mutant:
    """What was asked for counts as here as soon as it is granted."""

    def grant(fetches: PrefixFetcher, engine: Any, key: Any, supply: Any) -> None:
        real(fetches, engine, key, supply)
        if key in engine.copies.landing:
            hashes, chain, first = engine.copies._landing[key]
            for index in range(first, len(chain)):
                parent = chain[index - 1] if index else None
                engine.pool.register([], chain[index], hashes[index], parent)
            engine.copies._landing[key] = (hashes, chain, len(chain))
            waiting = fetches._open[supply.fetch].request
            if waiting.key in fetches._waiting:
                fetches._resume(engine, fetches._waiting[waiting.key])

    real = PrefixFetcher._grant
    return patch.object(PrefixFetcher, "_grant", grant)
