"""Assigns pool blocks to requests, cached prefixes first, extends and releases them, and finds reusable prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.engine.auxiliary_blocks import AuxiliaryBlocks
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.partial_blocks import PartialBlock
from kvferry.engine.request import Request
from kvferry.protocol.layout import blocks_for


class Readable(NamedTuple):
    """Blocks that can be read from a tier.

    chain: hashes from the first block to the last one that is read. missing: how many of them the pool lacks. saved:
    number of token blocks by which the prompt's reusable prefix grows."""

    chain: Sequence[bytes]
    missing: int
    saved: int


class ReusablePrefixes:
    """Reusable beginnings of prompts in one engine's pool. Owned by the engine thread.

    With recurrent layers or windows, a beginning can be reused up to where their auxiliary blocks are. These go with
    the blocks of its tokens wherever they travel: in a copy, a supply, or a tier. states: None without such layers."""

    def __init__(self, pool: BlockPool, states: AuxiliaryBlocks | None) -> None:
        self._pool, self._states = pool, states

    def count(self, hashes: Sequence[bytes]) -> int:
        """Return how many of these leading blocks a request can reuse now."""
        found = len(self._pool.match(hashes))
        return found if self._states is None else self._states.covered(hashes[:found])

    def chain(self, hashes: Sequence[bytes]) -> tuple[list[int], int]:
        """Return the ids of reusable blocks for another node, and how many of them hold tokens."""
        found = self._pool.match(hashes)
        if self._states is None:
            return found, len(found)
        count = self._states.covered(hashes[: len(found)])
        return self._pool.match(self._states.chain(hashes[:count])), count

    def supplied(self, hashes: Sequence[bytes], count: int) -> Sequence[bytes]:
        """Return the hashes of another node's `count` blocks for this prompt, as that node's `chain` has them."""
        if self._states is None:
            return hashes[:count]
        return self._states.chain(hashes[: self._states.tokens_of(count)])

    def readable(self, hashes: Sequence[bytes], run: Callable[[Sequence[bytes]], int], max_blocks: int) -> Readable:
        """Return the blocks that a tier can add.

        run: returns how many leading blocks of a list the tier has. max_blocks: limit of one read, which does
        not apply to a chain with auxiliary blocks: it is read as a whole."""
        held = len(self._pool.match(hashes))
        if self._states is None:
            count = run(hashes[held : held + max_blocks])
            return Readable(hashes[: held + count], count, count)
        covered, count = self._states.covered(hashes[:held]), held + run(hashes[held:])

        def found(block_hash: bytes) -> bool:
            return bool(self._pool.match((block_hash,)) or run((block_hash,)))

        while (count := self._states.covered(hashes[:count], found)) > covered:
            chain = self._states.chain(hashes[:count])
            here = len(self._pool.match(chain))
            if run(chain[here:]) == len(chain) - here:
                return Readable(chain, len(chain) - here, count - covered)
            count -= 1  # blocks after one that is read would have to be here, or the tier's
        return Readable((), 0, 0)


class BlockAssignment:
    """Blocks of requests, and the auxiliary blocks beside them.

    states: None for a model that needs nothing but the blocks of its chains. Owned by the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        copy_block: Callable[[int, int], None],
        states: AuxiliaryBlocks | None = None,
    ) -> None:
        self.pool, self.states = pool, states
        self.prefixes = ReusablePrefixes(pool, states)
        self._block_size, self._copy_block = block_size, copy_block

    def blocks_needed(self, request: Request) -> int:
        """Return how many blocks the request's tokens take, and those that a grant reserves for tokens to come."""
        ahead = request.job.ahead if request.grant is not None else 0
        return blocks_for(len(request.token_ids) + ahead, self._block_size)

    def cached(self, request: Request) -> int:
        """Return how many leading tokens of the request could be reused now."""
        hashes = request.reusable_hashes
        found = self.prefixes.count(hashes) if request.grant is None else len(self.pool.match(hashes))
        return found * self._block_size

    def computes_from(self, request: Request) -> int:
        """Return the first token that the request would compute if it got its blocks now."""
        cached = self.cached(request)
        tail = self._tail(request, cached)
        return cached + (tail.length if tail is not None else 0)

    def take(self, request: Request, kept: int) -> bool:
        """Hold the request's whole chain, cached blocks first, unless fewer than `kept` blocks would stay available."""
        hashes, states, beside = request.reusable_hashes, self.states, list[int]()
        found = self.pool.match(hashes)
        reused = found[: self.cached(request) // self._block_size]
        needed = self.blocks_needed(request)
        fresh = needed - len(reused)
        if states is not None:
            fresh += states.fresh(request, len(reused), needed)
            beside = states.reused(hashes[: len(reused)]) if request.grant is None else []
        if not self.pool.has_room([*reused, *beside], fresh, kept):
            return False
        if states is not None and not states.begin(request, len(reused), len(found)):
            return False
        tail = self._tail(request, len(reused) * self._block_size)
        self.pool.acquire(*request.holder, beside, 0)
        block_ids = self.pool.acquire(*request.holder, reused, fresh, cache_use=request.cache_use, hashes=hashes)
        assert block_ids is not None
        request.block_ids = block_ids[:needed]
        request.computed_len = len(reused) * self._block_size
        request.registered = len(reused)
        if states is not None:
            states.taken(request, beside, block_ids[needed:])
        if tail is not None:
            self._copy_tail(request, tail)
        return True

    def missing(self, request: Request, tokens: int = 0) -> int:
        """Return how many blocks a running request lacks for `tokens` tokens; 0: for those that it has."""
        tokens = tokens or len(request.token_ids)
        beside = self.states.missing(request, tokens) if self.states is not None else 0
        return max(0, blocks_for(tokens, self._block_size) - len(request.block_ids)) + beside

    def extend(self, request: Request, tokens: int = 0, keep: int = 0) -> bool:
        """Take the blocks that the request lacks for `tokens` tokens (0: for those that it has), if there are enough.

        keep: blocks that stay available."""
        tokens = tokens or len(request.token_ids)
        missing = self.missing(request, tokens)
        if not missing:
            return True
        more = self.pool.acquire(*request.holder, [], missing, keep=keep)
        if more is None:
            return False
        own = max(0, blocks_for(tokens, self._block_size) - len(request.block_ids))
        request.block_ids.extend(more[:own])
        if request.windows is not None:
            request.windows.append(more[own:])
        return True

    def room(self, request: Request) -> int:
        """Return for how many tokens the request has blocks."""
        blocks = len(request.block_ids)
        return self._block_size * (blocks if request.windows is None else min(blocks, request.windows.end))

    def release(self, request: Request) -> None:
        """Release the blocks of an ended or preempted request, except those that a grant's transfer may still write.

        Its full blocks stay in the cache, and so does a state at the end of the last one, if there is room for it."""
        if request.media is not None:
            request.media.forget()
        checkpoints = self.states.end(request) if self.states is not None else []
        self.pool.idle.rest(request.cache_use, [*request.block_ids[: request.registered], *checkpoints])
        if request.grant is None:
            self.pool.release(*request.holder, request.block_ids)
        if self.states is not None:
            self.states.release(request, checkpoints)

    def _tail(self, request: Request, start: int) -> PartialBlock | None:
        """Return a partial block that shares the tokens after `start` with other forks' prompts."""
        if (
            self.states is not None
            or not request.job.fork_of
            or request.grant is not None
            or request.job.work.whole_prompt
        ):
            return None
        upto = min(start + self._block_size, len(request.token_ids) - 1)
        return self.pool.tails.match(request.parent_of(start), request.token_ids[start:upto])

    def _copy_tail(self, request: Request, tail: PartialBlock) -> None:
        """Copy the partial block at once, before its source is reused, and cache the copy in its place."""
        start = request.computed_len
        target = request.block_ids[start // self._block_size]
        if target != tail.block_id:
            self._copy_block(tail.block_id, target)
        request.computed_len += tail.length
        self.pool.tails.put(request.parent_of(start), request.token_ids[start : request.computed_len], target)
