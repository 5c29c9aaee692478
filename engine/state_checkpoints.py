"""StateCheckpoints: rows of requests' recurrent states, and checkpoints of them in hashed blocks for prefix reuse.

A checkpoint is the state at the end of a full block, in `num_blocks` blocks with hashes of their own
(`protocol.hashing.state_hashes`): the first is a child of that block, each other one of the one before. So it is found,
counted, sent and evicted as blocks are, before the block that it belongs to, and it is whole if its last block is here.
Reuse of a prefix ends at a checkpoint. One is made at the end of a prompt's last full block, where a prompt departs
from cached prompts, every `stride` blocks, and at the last full block of a request that ends. A stream that is copied
to another node has more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request
from kvferry.engine.request_table import RequestTable
from kvferry.engine.state_memory import StateMemory
from kvferry.engine.state_rows import StateRowPool
from kvferry.protocol.hashing import state_hash, state_hashes


class StatePrefixes:
    """Prefixes in one engine's pool; implements `engine.auxiliary_blocks.AuxiliaryPrefixes`.

    num_blocks: blocks of a checkpoint."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        self._pool, self.num_blocks = pool, num_blocks

    @property
    def reserved(self) -> int:
        """Return the blocks that a migration reserves for a copy of a state."""
        return self.num_blocks

    @property
    def max_sent_blocks(self) -> int:
        """Return the blocks that follow a chain to another node."""
        return self.num_blocks

    @property
    def longest(self) -> int:
        """Return the blocks of the longest chain for which the pool has room beside a state."""
        return self._pool.num_blocks - self.num_blocks

    def covered(self, hashes: Sequence[bytes], found: Callable[[bytes], bool] | None = None) -> int:
        """Return how many of these leading blocks, all of them found, can be reused: those before a checkpoint.

        found: whether one is, by its last block's hash; None: it is in the pool."""
        return self._first_whole(range(len(hashes), 0, -1), hashes, found or self._here)

    def chain(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes that another node needs: these blocks, then the checkpoint at their end."""
        return [*hashes, *state_hashes(hashes[-1], self.num_blocks)] if hashes else []

    def tokens_of(self, blocks: int) -> int:
        """Return how many blocks of such a chain hold tokens."""
        return max(0, blocks - self.num_blocks)

    def tokens_before(self, index: int, blocks: int) -> int:
        """Return how many of the first `index` blocks of such a chain hold tokens."""
        return min(index, self.tokens_of(blocks))

    def parent(self, index: int, blocks: int) -> int:
        """Return the index of the parent of a block in such a chain: of the block before it."""
        return index - 1

    def held(self, request: Request) -> int:
        """Return the leading blocks of a running request before its last checkpoint that is here; 0 without one."""
        rows = request.state_rows
        return 0 if rows is None else self._first_whole(reversed(rows.checkpoints), request.hashes, self._here)

    def reused(self, hashes: Sequence[bytes]) -> list[int]:
        """Return no blocks: `begin` copies the state from its checkpoint."""
        return []

    def _here(self, block_hash: bytes) -> bool:
        return bool(self._pool.match((block_hash,)))

    def _first_whole(self, counts: Iterable[int], hashes: Sequence[bytes], found: Callable[[bytes], bool]) -> int:
        """Return the first of these counts of leading blocks whose checkpoint is found; 0 if none is."""
        last = self.num_blocks - 1
        return next((count for count in counts if found(state_hash(hashes[count - 1], last))), 0)


MIN_STRIDE = 4
"""Fewest blocks from one checkpoint of a request to the next; computing these blocks again costs hardly any time."""
COPIED_BLOCKS = 8
"""Fewest blocks between checkpoints of a stream that is copied to another node: as many as a copy has at least."""
STRIDE_TOKENS = 1024
"""Least distance of regular checkpoints, in tokens; prompts are computed in several steps for them."""


def stride_of(num_blocks: int, min_stride: int) -> int:
    """Return the blocks from one regular checkpoint of `num_blocks` blocks to the next, `min_stride` or more.

    It is a power of two, so that checkpoints of prompts with a common prefix coincide, and at least `num_blocks`, so
    that checkpoints never take more memory than the blocks between them."""
    return 1 << (max(num_blocks, min_stride) - 1).bit_length()


class StateCheckpoints(StatePrefixes):
    """States of one engine's requests. Owned by the engine thread.

    memory, row_pool: the rows' tensor, and which rows are free. stride: blocks between regular checkpoints; 0:
    `stride_of`."""

    def __init__(self, pool: BlockPool, memory: StateMemory, block_size: int, stride: int = 0) -> None:
        super().__init__(pool, memory.num_blocks)
        self.memory, self._block_size = memory, block_size
        self.row_pool = StateRowPool(len(memory.rows))
        self.stride = stride or stride_of(self.num_blocks, STRIDE_TOKENS // block_size)
        self._stream_stride = min(self.stride, stride_of(self.num_blocks, COPIED_BLOCKS))
        self.saved_total = self.loaded_total = 0

    def rows_used(self) -> float:
        """Return the share of rows that requests have. May be called from any thread."""
        return self.row_pool.used

    def fresh(self, request: Request, reused: int, needed: int) -> int:
        """Return the blocks with which a transfer takes the request's state to another node, or brings it."""
        return self.num_blocks if request.grant is not None or request.transfer is not None else 0

    def begin(self, request: Request, reused: int, found: int) -> bool:
        """Give the request rows, with the state after its first `reused` blocks; False if all rows are taken.

        The checkpoint must be here. found: leading blocks that are here. A request whose prompt arrives by a grant
        gets its state by `arrived`."""
        rows = self.row_pool.take()
        if rows is None:
            return False
        request.state_rows, rows.shared = rows, found * self._block_size
        if reused and request.grant is None:
            names = state_hashes(request.hashes[reused - 1], self.num_blocks)
            self.memory.load(self._pool.match(names), rows.load(reused * self._block_size, self._block_size))
            rows.checkpointed = rows.length
            rows.checkpoints.append(reused)
            self.loaded_total += 1
        return True

    def taken(self, request: Request, reused: Sequence[int], fresh: Sequence[int]) -> None:
        """Give the request the blocks for a transfer of its state."""
        request.state_blocks = list(fresh)

    def missing(self, request: Request, tokens: int) -> int:
        """Return 0: a state does not grow."""
        return 0

    def stop(self, request: Request) -> int:
        """Return the length up to which the request's next slice may go: to where a checkpoint is due, at most.

        The last token of a prompt with a grammar is computed by itself: it is computed again until the mask is made,
        and a state cannot see a token twice."""
        rows, size, start, length = request.state_rows, self._block_size, request.computed_len, len(request.token_ids)
        assert rows is not None
        ends = [length - 1 if request.job.grammar is not None and start < length - 1 else length]
        if self._pool.prefix_caching:
            step, min_end = self.stride * size, rows.checkpointed + MIN_STRIDE * size
            due = ((start // step + 1) * step, rows.shared, request.last_start)
            ends += [end for end in due if end > start and end >= min_end]
        return min(ends)

    def advance(self, request: Request, tokens: int) -> None:
        """Record that a step that computed `tokens` of the request is committed; save a checkpoint that is due."""
        rows = request.state_rows
        assert rows is not None
        assert rows.length + tokens == request.computed_len, "a state that saw other tokens"
        rows.advance(tokens, self._block_size)
        length = rows.length
        copied = request.job.buddy is not None and request.output_here > 0
        stride = self._stream_stride if copied else self.stride
        if length in (rows.shared, request.last_start) or length % (stride * self._block_size) == 0:
            self._save_boundary(request)

    def arrived(self, request: Request) -> None:
        """Load the state that a transfer brought, after the request's computed tokens, and release its blocks."""
        rows = request.state_rows
        assert rows is not None
        self.memory.load(request.state_blocks, rows.load(request.computed_len, self._block_size))
        self._pool.release(*request.holder, request.state_blocks)
        request.state_blocks = []

    def sent(self, request: Request, reserved: Sequence[int]) -> list[int]:
        """Save the request's state into these blocks, from which a transfer takes it, and return them."""
        rows = request.state_rows
        assert rows is not None
        assert rows.length == request.computed_len, "a state that saw other tokens"
        self.memory.save(rows.before, reserved)
        return list(reserved)

    def end(self, request: Request) -> list[int]:
        """Take the rows of a request that ends or loses its blocks; return the blocks of its checkpoints.

        The request still holds its blocks. The state after its last full block becomes a checkpoint, if there is
        room. The blocks returned are held for `owner`, so that they become idle together with the request's own."""
        rows = request.state_rows
        if rows is None:
            return []
        self._save_boundary(request)
        request.state_rows = None
        self.row_pool.release(rows.rows)
        blocks: list[int] = []
        for count in rows.checkpoints:
            blocks += self._pool.match(state_hashes(request.hashes[count - 1], self.num_blocks))
        return self._pool.acquire(owner(request), REQUEST, blocks, 0) or []

    def release(self, request: Request, blocks: list[int]) -> None:
        """Release the blocks that `end` returned, after those of the request.

        Those for a transfer of its state are the request's own, unless a grant's link may still write them."""
        if request.grant is None:
            self._pool.release(*request.holder, request.state_blocks)
        self._pool.release(owner(request), REQUEST, blocks)

    def check(self, request_table: RequestTable) -> None:
        """Assert that every request with blocks has rows, and that no row is lost."""
        for request in request_table:
            assert bool(request.block_ids) == (request.state_rows is not None), f"{request.key}: blocks without a state"
        self.row_pool.check(r.state_rows for r in request_table if r.state_rows is not None)

    def _save_boundary(self, request: Request) -> None:
        """Save the state after the request's last full block, unless a checkpoint is near or there is no room."""
        rows, size = request.state_rows, self._block_size
        if rows is None or rows.boundary is None or rows.boundary[0] < rows.checkpointed + MIN_STRIDE * size:
            return
        (length, row), pool = rows.boundary, self._pool
        count = length // size
        if not pool.prefix_caching or request.registered < count:
            return
        names = state_hashes(request.hashes[count - 1], self.num_blocks)
        if not pool.match(names[-1:]):
            parent = request.block_ids[count - 1]
            taken = pool.acquire(owner(request), REQUEST, [parent], self.num_blocks)
            if taken is None:
                return
            taken[1:] = sorted(taken[1:])  # neighbours are copied together
            self.memory.save(row, taken[1:])
            for place, name in enumerate(names, 1):
                taken[place] = pool.register([(owner(request), REQUEST)], taken[place], name, taken[place - 1])
            pool.release(owner(request), REQUEST, taken)
            self.saved_total += 1
        rows.checkpointed = length
        rows.checkpoints.append(count)


def owner(request: Request) -> tuple[str, str, int]:
    """Return the owner of the holds on a request's checkpoints, which last no longer than a call."""
    return ("checkpoint", *request.key)
