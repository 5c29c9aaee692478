"""Interface of the blocks that a request needs beside its KV chain: recurrent states or pages of window layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request
from kvferry.engine.request_table import RequestTable
from kvferry.engine.runner import StepRunner
from kvferry.engine.state_checkpoints import StateCheckpoints
from kvferry.engine.window_pages import WindowPages


class AuxiliaryPrefixes(Protocol):
    """Blocks that go with those of a chain's tokens wherever these travel, and the prefixes that they allow.

    num_blocks: blocks of a checkpoint or page."""

    num_blocks: int

    @property
    def reserved(self) -> int:
        """Return the blocks that a migration reserves for a copy."""

    @property
    def max_sent_blocks(self) -> int:
        """Return the maximum number of blocks that go with a chain to another node."""

    @property
    def longest(self) -> int:
        """Return the blocks of the longest chain for which the pool has room."""

    def covered(self, hashes: Sequence[bytes], found: Callable[[bytes], bool] | None = None) -> int:
        """Return how many of these leading blocks, all of them found, can be reused.

        found: whether such blocks are, by the hash of its last block; None: it is in the pool."""

    def chain(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of these blocks and of the auxiliary blocks that go with them, each after its parent."""

    def tokens_of(self, blocks: int) -> int:
        """Return how many blocks of a `chain` of `blocks` blocks hold tokens."""

    def tokens_before(self, index: int, blocks: int) -> int:
        """Return how many of the first `index` blocks of a `chain` of `blocks` blocks hold tokens."""

    def parent(self, index: int, blocks: int) -> int:
        """Return the index of the parent of a block in a `chain` of `blocks` blocks; -1: it is the first."""

    def held(self, request: Request) -> int:
        """Return the leading blocks of a running request that a copy can have."""

    def reused(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that a request holds to reuse these leading blocks, beside them."""


class AuxiliaryBlocks(AuxiliaryPrefixes, Protocol):
    """Recurrent states (`StateCheckpoints`) or pages of layers with windows (`WindowPages`) of one engine's requests.

    Both are kept in ordinary blocks. A prefix can be reused up to where they are here. stride: blocks between the
    places at which routers look for them. saved_total, loaded_total: checkpoints. Owned by the engine thread."""

    stride: int
    saved_total: int
    loaded_total: int

    def fresh(self, request: Request, reused: int, needed: int) -> int:
        """Return how many new blocks a request takes on admission, beside the `needed` blocks of its chain."""

    def begin(self, request: Request, reused: int, found: int) -> bool:
        """Prepare a request that reuses `reused` of the `found` leading blocks; False if it must wait."""

    def taken(self, request: Request, reused: Sequence[int], fresh: Sequence[int]) -> None:
        """Give the request the blocks of `reused` and the new ones, once it holds its chain."""

    def missing(self, request: Request, tokens: int) -> int:
        """Return how many blocks the request lacks, beside its chain, to grow to `tokens` tokens."""

    def stop(self, request: Request) -> int:
        """Return the length up to which the request's next slice may go."""

    def advance(self, request: Request, tokens: int) -> None:
        """Record that a step that computed `tokens` of the request is committed."""

    def arrived(self, request: Request) -> None:
        """Take over the state or pages that a transfer brought in `state_blocks`."""

    def sent(self, request: Request, reserved: Sequence[int]) -> list[int]:
        """Return the blocks that another node needs at the request's computed tokens; reserved: for a copy."""

    def end(self, request: Request) -> list[int]:
        """Clear the state of a request that ends or loses its blocks; return held blocks to cache with its chain."""

    def release(self, request: Request, blocks: list[int]) -> None:
        """Release the blocks that `end` returned, after those of the request's chain."""

    def check(self, request_table: RequestTable) -> None:
        """Assert that every request has the auxiliary blocks that it needs."""


def make_auxiliary_blocks(
    runner: StepRunner, pool: BlockPool, block_size: int, step_tokens: int, state_stride: int
) -> AuxiliaryBlocks | None:
    """Return the manager of blocks that the runner's model needs beside those of its chains; None if it needs none."""
    groups = runner.model.info.groups
    if groups is not None:
        return WindowPages(pool, groups, block_size, step_tokens)
    return None if runner.states is None else StateCheckpoints(pool, runner.states, block_size, state_stride)
