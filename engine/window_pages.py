"""WindowPages: K/V of sliding-window layers, in pages of ordinary blocks that requests release behind their windows.

Page i of a sequence is one block of each group of such layers (`protocol.layer_groups`), for the tokens of block i of
its chain. Its blocks have hashes of their own (`protocol.hashing.state_hashes`): the first is a child of that block,
each other one of the one before. So pages are found, counted, sent and evicted as blocks are, before the block that
they belong to, and a page is whole if its last block is here. A request holds the pages of its window and those that
its next tokens fill. Pages behind the window are cached, and evicted before all other blocks. A prefix can be reused if
the pages of the window before its end are here."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request
from kvferry.engine.request_table import RequestTable
from kvferry.engine.window_blocks import WindowBlocks
from kvferry.engine.window_prefixes import WindowPrefixes
from kvferry.protocol.hashing import state_hashes
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.layout import blocks_for

AHEAD = 2048
"""Limit of a prompt's tokens for which pages are held ahead of its window; longer steps would be hardly faster."""
KEPT_EVERY = 4
"""Tiers keep whole windows that are at least KEPT_EVERY times their length apart, and those where sequences end."""
MIN_AHEAD = 128
"""Lower bound of a prompt's tokens ahead of its window where MEMORY_SLACK bounds them; fewer would make steps slow."""
MEMORY_SLACK = 0.05
"""Share of what its layers need that a long prompt may hold beyond it, if its steps keep a quarter of their tokens."""
SHARE = 2
"""Pages of one request take at most one block in SHARE of the pool, if its window leaves a choice."""


class PageShares:
    """Bounds of the pages of one request in a pool of `num_blocks` blocks. step_tokens: limit of a step's tokens.

    max_held: limit of pages held at once. longest: blocks of the longest chain for which there is room beside them."""

    __slots__ = ("_count", "_min_held", "_needed", "longest", "max_held")

    def __init__(self, groups: LayerGroups, block_size: int, step_tokens: int, num_blocks: int) -> None:
        window, room = groups.max_pages(block_size), num_blocks // SHARE // groups.count
        tokens = min(step_tokens, max(AHEAD, groups.window))
        ahead = blocks_for(tokens, block_size)
        self._count, self._needed = groups.count, sum(map(abs, groups.windows)) / (block_size * groups.full)
        self._min_held = window + blocks_for(max(MIN_AHEAD, tokens // 4), block_size)
        self.max_held = max(window + 1, min(window + ahead, room))
        beside = self.max_held * groups.count
        self.longest = num_blocks - beside if num_blocks > beside + self.max_held else num_blocks // (1 + groups.count)

    def limit(self, chain: int) -> int:
        """Return the limit of pages of a request with `chain` blocks: fewer than `max_held` if it is long."""
        spare = int((chain + self._needed) * (1 + MEMORY_SLACK)) - chain
        within = spare // self._count
        return min(within, self.max_held) if within >= self._min_held else self.max_held


class WindowPages(WindowPrefixes):
    """Pages of one engine's requests; implements `engine.auxiliary_blocks.AuxiliaryBlocks`. Owned by the engine thread.

    step_tokens: limit of a step's tokens. stride: distance in blocks at which routers look for pages."""

    stride = 8
    saved_total = loaded_total = 0

    def __init__(self, pool: BlockPool, groups: LayerGroups, block_size: int, step_tokens: int) -> None:
        super().__init__(pool, groups, block_size)
        self._groups, self._block_size = groups, block_size
        self._shares = PageShares(groups, block_size, step_tokens, pool.num_blocks)
        self._kept_every = 1 << (KEPT_EVERY * max(1, self._before) - 1).bit_length()

    @property
    def longest(self) -> int:
        """Return the blocks of the longest chain for which the pool has room beside its pages."""
        return self._shares.longest

    def fresh(self, request: Request, reused: int, needed: int) -> int:
        """Return how many new blocks a request takes for pages on admission, of `needed` blocks of its chain."""
        if request.grant is not None:
            tokens, size = len(request.token_ids), self._block_size
            pages = self._before + 1 if request.job.ahead else needed - self._groups.first_page(tokens, size)
            return min(pages, needed) * self.num_blocks
        return (min(needed, self._first(reused) + self._share(request)) - reused) * self.num_blocks

    def begin(self, request: Request, reused: int, found: int) -> bool:
        """Return True: a request needs nothing but blocks."""
        return True

    def taken(self, request: Request, reused: Sequence[int], fresh: Sequence[int]) -> None:
        """Give these blocks to a request that is admitted: the reused ones, then the fresh ones."""
        if request.grant is not None:
            request.state_blocks = list(fresh)
            return
        self._keep(request, request.registered)
        first = request.registered - len(reused) // self.num_blocks
        request.windows = WindowBlocks(first, self.num_blocks, [*reused, *fresh])
        request.windows.registered = request.registered

    def missing(self, request: Request, tokens: int) -> int:
        """Return how many blocks it lacks for the pages of `tokens` tokens, within its share."""
        pages = request.windows
        if pages is None:
            return 0
        end = min(blocks_for(tokens, self._block_size), pages.first + self._share(request))
        return max(0, end - pages.end) * self.num_blocks

    def stop(self, request: Request) -> int:
        """Return the length up to which the request's next slice may go: as far as it has pages.

        If the pages do not hold the whole image that comes next, it is the computed length: the slice must wait."""
        pages, media, start = request.windows, request.media, request.computed_len
        assert pages is not None
        end = min(len(request.token_ids), pages.end * self._block_size)
        return start if media is not None and start < end < start + media.whole(start, end - start) else end

    def advance(self, request: Request, tokens: int) -> None:
        """Make full pages findable, release those behind the window, and take new pages if it has prompt left.

        Released pages that other requests use are not free; if too few are free, pages are taken when needed."""
        pages = request.windows
        assert pages is not None
        self._register(request, pages)
        released = pages.drop(self._groups.first_page(request.computed_len, self._block_size))
        if not released:
            return
        self._pool.idle.evict_first(released)
        self._pool.release(*request.holder, released)
        more = self._pool.acquire(*request.holder, [], self.missing(request, len(request.token_ids)))
        pages.append(more or ())

    def arrived(self, request: Request) -> None:
        """Take over the pages that a transfer brought, and release blocks of its grant that it did not need."""
        size, blocks = self._block_size, request.state_blocks
        first = self._groups.first_page(request.computed_len, size)
        used = (blocks_for(request.computed_len, size) - first) * self.num_blocks
        request.windows, request.state_blocks = WindowBlocks(first, self.num_blocks, blocks[:used]), []
        self._pool.release(*request.holder, blocks[used:])

    def sent(self, request: Request, reserved: Sequence[int]) -> list[int]:
        """Return the blocks of the pages that another node needs to continue after the request's computed tokens."""
        pages, size = request.windows, self._block_size
        assert pages is not None
        return pages.ids(self._groups.first_page(request.computed_len, size), blocks_for(request.computed_len, size))

    def end(self, request: Request) -> list[int]:
        """Take the pages of a request that ends or loses its blocks; return those that can be found, for its session.

        The request still holds its chain. Pages that cannot be found are released here, and so are blocks that a grant
        brought to a request that never began."""
        pages = request.windows
        if pages is None:
            if request.grant is None and request.block_ids:
                self._pool.release(*request.holder, request.state_blocks)
                request.state_blocks = []
            return []
        self._register(request, pages)
        for count in (request.registered - 1, request.registered):  # the same prompt reuses all but its last token
            self._keep(request, count)
        request.windows = None
        self._pool.release(*request.holder, pages.ids(pages.registered))
        return pages.ids(end=pages.registered)

    def release(self, request: Request, blocks: list[int]) -> None:
        """Release the blocks that `end` returned, after those of the request's chain."""
        self._pool.release(*request.holder, blocks)

    def check(self, request_table: RequestTable) -> None:
        """Assert that every request with blocks has pages for its window, or those of its grant."""
        for request in request_table:
            pages = request.windows
            computes = bool(request.block_ids) and request.grant is None
            assert (pages is not None) == computes, f"{request.key}: no pages"
            if pages is None:
                continue
            assert len({len(ids) for ids in pages.groups}) == 1, f"{request.key}: torn pages"
            first = self._groups.first_page(request.computed_len, self._block_size)
            assert pages.first <= first, f"{request.key}: page {first} is lost"
            assert pages.end * self._block_size >= request.computed_len, f"{request.key}: its last page is lost"

    def _share(self, request: Request) -> int:
        """Return the limit of pages that a request holds at once, with room for its longest image computed whole."""
        media, limit = request.media, self._shares.limit(blocks_for(len(request.token_ids), self._block_size))
        if media is None or not media.bidirectional:
            return limit
        return limit + blocks_for(max((item.length for item in media.items), default=0), self._block_size)

    def _keep(self, request: Request, count: int) -> None:
        """Let tiers keep the window before the end of the request's first `count` blocks."""
        if self._pool.changes.untiered and count > 0:
            window = request.hashes[self._first(count) : count]
            self._pool.changes.keep(name for each in window for name in state_hashes(each, self.num_blocks))

    def _register(self, request: Request, pages: WindowBlocks) -> None:
        """Make the pages of the request's findable blocks findable; replace pages whose equals are findable already."""
        for number in range(pages.registered, min(request.registered, pages.end)):
            parent, place = request.block_ids[number], number - pages.first
            tiers = number % self._kept_every >= self._kept_every - self._before
            for group, name in zip(pages.groups, state_hashes(request.hashes[number], self.num_blocks), strict=True):
                parent = self._pool.register([request.holder], group[place], name, parent, tiers=tiers)
                request.replacements += parent != group[place]
                group[place] = parent
            pages.registered = number + 1
