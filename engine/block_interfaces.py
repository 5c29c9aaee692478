"""Interfaces of the block pool's ledger of holds and of its eviction order, and the reasons for a hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from kvferry.engine.cache_use import CacheUse, IdleStats, Pause

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
        """Give up holds; return the blocks, in the order given, that nobody holds any more."""

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


class EvictionOrder(Protocol):
    """Idle blocks of a pool and the order of their eviction (engine/eviction.py). Owned by the engine thread."""

    stats: IdleStats

    def __len__(self) -> int: ...

    def __contains__(self, block_id: int) -> bool: ...

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Learn that a request is about to use `reused`, the blocks of the first `hashes`; fill in cache_use."""

    def rest(self, cache_use: CacheUse, block_ids: Sequence[int]) -> None:
        """Learn which blocks an ended request has left; they are `put` once nothing else uses them."""

    def evict_first(self, block_ids: Sequence[int]) -> None:
        """Learn which blocks a continuing request gives up; once nothing else uses them they are evicted first."""

    def pause(self, request_id: str, reason: Pause, tools: int = 0) -> None:
        """Learn why the session of a request that ended pauses; ignored if the request is not remembered.

        tools: group of the tools that its output calls, 0 if unknown."""

    def close(self, session: str) -> None:
        """Evict first the blocks that only this session used; ignored if it is not remembered."""

    def put(self, block_id: int, *, leaf: bool) -> None:
        """Add a block that has no user left. leaf: it has no children."""

    def became_leaf(self, block_id: int) -> None:
        """Note that the block has no children any more; ignored if it is not idle."""

    def remove(self, block_id: int) -> None:
        """Remove a block that is used again; ignored if it was not idle."""

    def pop(self) -> int:
        """Remove and return the block to evict, which has no children. Raises KeyError if none is idle."""
        ...

    def forget(self, block_id: int, block_hash: bytes, *, evicted: bool) -> None:
        """Remove a block that has lost its content, and all knowledge of it."""

    def check(self, block_id: int, *, leaf: bool) -> None:
        """Assert that the block may be evicted if and only if it is idle and a leaf."""
