"""Block index interface: maps each block to the nodes that hold it, as rows {node id: epoch}.

Where a block's row stands is a function of its chain (`protocol.index_rows`).

A hint, never an authority: a row may be missing, and for a moment may outlive its block; the node itself checks. Rows
of an epoch that is not the node's live one count as absent, so a crash or restart voids a node's rows at once.
A node has rows under its id, for blocks of its pool, and under `on_tier` of it, for those that it must read first. They
live by the same lease, and none tells of the others. What a store has that nodes share stands under ON_STORE, anyone
who wrote the row: one of the last block of each group. It lives for its time, and nobody's lease ends it.
Implementations: `redis_store.RedisStore` and `memory_store.MemoryStore`. Their calls raise RegistryUnavailable and
nothing else; every call may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvferry.protocol.layout import STORE_GROUP

ROW_TTL_S = 3600.0
"""Life of a row after it, or another one of its key, was last written. A node writes its rows again at half of it."""
ON_STORE, STORE_EPOCH = "\x1fstore", 1
"""Of no node."""


def on_tier(node_id: str, tier: str) -> str:
    """Under which the node's rows of blocks stand that it has in this tier of its own, by the tier's name."""
    return f"{node_id}\x1f{tier}"


def owner(name: str) -> str:
    """The node whose rows stand under this name; empty: nobody's alone."""
    return name.partition("\x1f")[0]


def store_hashes(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return the hashes of a chain that stand for groups of a store."""
    return hashes[STORE_GROUP - 1 :: STORE_GROUP]


class BlockIndex(Protocol):
    """Interface of the block index."""

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Take the rows `removed` out, then put `stored` in.

        Unless this epoch is registered, rows of another one are not taken out, and those of a newer one not
        overwritten; where it is, all others are void, newer ones too: the clock that gave them was set back since. On
        an error any part may have happened. Raises RegistryFull where there is no memory for rows that are not there
        yet."""

    async def refresh(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> None:
        """`publish` rows again, and drop what stands under the same keys and belongs to nodes without a live lease, or
        to an older epoch than that of the lease: all of it where it is little, else some, at random."""

    async def present(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> int:
        """Return how many of these rows of the node are present."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Return how many leading blocks of a sequence each of `nodes` (name → live epoch) holds.

        Nodes with none are left out. ON_STORE among them: in whole groups, by the rows of their last blocks.

        Relies on "a node never drops a block before its descendants", so most rows need not be read. A length is only
        reported if, in one state of the index, its last block was read as held and the next one, if any, as not."""
