"""Interface of the block index, which maps each KV block to the nodes that hold it, as rows {node id: epoch}.

The key of a block's row derives from its chain (`protocol.index_rows`). The index is a hint: a row may be missing, or
briefly remain after its block is gone, so the node itself checks. Rows of an epoch other than the node's live one count
as absent, so a crash or restart voids a node's rows at once.

A node has rows under its id for blocks of its pool, and under `on_tier` for blocks that it must first read from a tier.
Both depend on the node's lease, not on each other. Blocks in the shared object store have rows under ON_STORE,
one for the last block of each group, independent of the node that wrote them. These live ROW_TTL_S and depend on no
lease.

Implementations: `redis_store.RedisStore` and `memory_store.MemoryStore`. Calls raise only RegistryUnavailable, and
every call may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvferry.protocol.layout import STORE_GROUP

ROW_TTL_S = 3600.0
"""Seconds after which a row expires, counted from the last write of any row of its key.

A node writes its rows again after half of it."""
ON_STORE, STORE_EPOCH = "\x1fstore", 1
"""Name and epoch of the rows for the shared object store, which belong to no node."""


def on_tier(node_id: str, tier: str) -> str:
    """Return the name for rows of blocks that the node holds in this tier."""
    return f"{node_id}\x1f{tier}"


def owner(name: str) -> str:
    """Return the node id that a row name belongs to; empty for ON_STORE."""
    return name.partition("\x1f")[0]


def store_hashes(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return the hashes of a chain that stand for groups of a store: every STORE_GROUP-th one."""
    return hashes[STORE_GROUP - 1 :: STORE_GROUP]


class BlockIndex(Protocol):
    """Interface of the block index."""

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Remove the rows `removed`, then write the rows `stored`.

        If this epoch is registered, it overwrites and removes rows of all other epochs; newer ones come from a clock
        that has since been set back. Otherwise rows of other epochs are not removed, and rows of newer ones not
        overwritten. After an error any part may have been applied. Raises RegistryFull if new rows exceed the store's
        memory."""

    async def refresh(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> None:
        """`publish` rows again, and drop void rows of other nodes under the same keys.

        Rows of nodes without a live lease, or of an older epoch than the lease's, are void. A key with few rows is
        cleaned completely, others in a random sample."""

    async def present(self, node_id: str, epoch: int, rows: Sequence[bytes]) -> int:
        """Return how many of these rows of the node are present."""

    async def holders(self, rows: Sequence[bytes], nodes: Mapping[str, int]) -> list[frozenset[str]]:
        """Return, for each of these rows, which of `nodes` (name → live epoch) have it."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Return how many leading blocks of a sequence each of `nodes` (name → live epoch) holds.

        Nodes with none are omitted. ON_STORE counts whole groups, by the rows of their last blocks.

        A node never drops a block before its descendants, so most rows need not be read. A length is reported only if,
        in one state of the index, its last block was read as held and the next one, if any, as not held."""
