"""The block pool against random use: books balance, reuse is right, leaves go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.cache_use import CacheUse
from kvferry.engine.ledger import Ledger
from kvferry.protocol.hashing import chain
from kvferry.protocol.index_rows import GROUP, rows_of
from kvferry.protocol.layout import blocks_for

BS = 2


def make_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks, Ledger(num_blocks))


def run_through(pool: BlockPool, owner: str, token_ids: list[int]) -> list[int] | None:
    """Acquire, compute and register a sequence; returns its chain, still held."""
    hashes = chain(b"root", token_ids, BS)
    reused = pool.match(hashes)
    fresh = blocks_for(len(token_ids), BS) - len(reused)
    blocks = pool.acquire(owner, REQUEST, reused, fresh, cache_use=CacheUse(), hashes=hashes)
    if blocks is None:
        return None
    for i in range(len(reused), len(hashes)):
        blocks[i] = pool.register([(owner, REQUEST)], blocks[i], hashes[i], blocks[i - 1] if i else None)
    return blocks


def test_a_released_prefix_is_found_again() -> None:
    pool = make_pool()
    first = run_through(pool, "a", [1, 2, 3, 4])
    assert first is not None
    pool.release("a", REQUEST, first)
    again = run_through(pool, "b", [1, 2, 3, 4, 5, 6])
    assert again is not None
    assert again[:2] == first
    pool.release("b", REQUEST, again)
    pool.check_integrity()


def test_no_room_changes_nothing() -> None:
    pool = make_pool(3)
    held = run_through(pool, "a", [1, 2, 3, 4])
    assert held is not None
    assert pool.acquire("b", REQUEST, pool.match(chain(b"root", [1, 2], BS)), 2) is None
    assert pool.available == 1
    pool.check_integrity()


def test_eviction_takes_leaves_before_their_parents() -> None:
    pool = make_pool(4)
    held = run_through(pool, "a", [1, 2, 3, 4, 5, 6])
    assert held is not None
    pool.release("a", REQUEST, held)
    other = run_through(pool, "b", [9, 9, 9, 9])
    assert other is not None
    assert pool.match(chain(b"root", [1, 2, 3, 4, 5, 6], BS)) == held[:2]
    pool.release("b", REQUEST, other)
    pool.check_integrity()


def test_equal_content_computed_twice_becomes_one_block() -> None:
    pool = make_pool(8)
    tokens = [1, 2, 3, 4]
    hashes = chain(b"root", tokens, BS)
    a = pool.acquire("a", REQUEST, [], 2)
    b = pool.acquire("b", REQUEST, [], 2)
    assert a is not None
    assert b is not None
    for owner, blocks in (("a", a), ("b", b)):
        for i in range(2):
            blocks[i] = pool.register([(owner, REQUEST)], blocks[i], hashes[i], blocks[i - 1] if i else None)
    assert a == b
    pool.release("a", REQUEST, a)
    pool.check_integrity()
    pool.release("b", REQUEST, b)
    pool.check_integrity()
    assert pool.cached_blocks == 2


def test_what_is_forgotten_is_not_found_nor_what_stands_behind_it() -> None:
    """The request that holds it runs on, and makes nothing findable behind it."""
    pool = make_pool(8)
    held = run_through(pool, "a", [1, 2, 3, 4, 5, 6])
    other = run_through(pool, "b", [1, 2, 7, 7])
    assert held is not None
    assert other is not None
    pool.forget([held[1]])
    assert pool.findable() == chain(b"root", [1, 2, 7, 7], BS)
    more = pool.acquire("a", REQUEST, [], 1)
    assert more is not None
    behind = chain(b"root", [1, 2, 3, 4, 5, 6, 8, 8], BS)[3]
    assert pool.register([("a", REQUEST)], more[0], behind, held[2]) == more[0]
    assert len(pool.findable()) == 2
    pool.release("a", REQUEST, [*held, *more])
    pool.release("b", REQUEST, other)
    pool.forget([other[0]])
    pool.check_integrity()
    assert (pool.findable(), pool.free_blocks) == ([], 8)


def test_what_goes_on_behind_a_forgotten_block_takes_no_other_ones_chain_up_in_the_middle() -> None:
    """It would hold a block without those before it, which then leave before it."""
    pool = BlockPool(8, Ledger(8))
    hashes = chain(b"root", [1, 2, 3, 4, 5, 6], BS)
    first = pool.acquire("first", REQUEST, [], 3)
    assert first
    for index in (0, 1):
        pool.register([("first", REQUEST)], first[index], hashes[index], first[index - 1] if index else None)
    pool.forget([first[1]])
    other = pool.acquire("other", REQUEST, pool.match(hashes), 2)
    assert other
    for index in (1, 2):
        pool.register([("other", REQUEST)], other[index], hashes[index], other[index - 1])
    first[2] = pool.register([("first", REQUEST)], first[2], hashes[2], first[1])
    pool.release("other", REQUEST, other)
    fill = pool.acquire("fill", REQUEST, [], pool.available)
    assert fill
    pool.release("fill", REQUEST, fill)
    pool.release("first", REQUEST, first)
    pool.check_integrity()
    assert pool.available == 8


def test_rows_are_those_of_the_whole_chain_also_where_chains_part() -> None:
    pool = make_pool(100)
    trunk, ends = list(range(BS * (GROUP + 5))), [[7] * BS * GROUP, [8] * BS * GROUP]
    whole = [chain(b"root", trunk + end, BS) for end in ends]
    chains = [run_through(pool, name, trunk + end) for name, end in zip("ab", ends, strict=True)]
    rows = dict(zip(whole[0] + whole[1], rows_of(whole[0]) + rows_of(whole[1]), strict=True))
    assert pool.changes.drain() == (rows, {})
    assert (pool.findable(), pool.changes.rows()) == (list(rows), list(rows.values()))
    for name, held in zip("ab", chains, strict=True):
        assert held is not None
        pool.release(name, REQUEST, held)
    fill = pool.acquire("c", REQUEST, [], 100)
    assert fill is not None
    assert pool.changes.drain() == ({}, rows)
    assert pool.changes.rows() == []


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, Ledger(4), prefix_caching=False)
    held = run_through(pool, "a", [1, 2, 3, 4])
    assert held is not None
    pool.release("a", REQUEST, held)
    assert pool.match(chain(b"root", [1, 2], BS)) == []
    assert pool.free_blocks == 4


def test_releasing_what_is_not_held_is_our_bug() -> None:
    pool = make_pool()
    with pytest.raises(AssertionError):
        pool.release("nobody", REQUEST, [0])


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(st.lists(st.tuples(sequences, st.booleans(), st.integers(0, 29)), max_size=40), st.integers(2, 9), st.booleans())
def test_books_balance_and_changes_mirror_the_pool(
    steps: list[tuple[list[int], bool, int]], size: int, rests: bool
) -> None:
    """Requests come and go, and now and then a block of the pool is forgotten, held or not."""
    pool = make_pool(size)
    held: dict[str, list[int]] = {}
    mirror: dict[bytes, bytes] = {}
    for number, (tokens, keep, wrong) in enumerate(steps):
        owner = f"r{number}"
        blocks = run_through(pool, owner, tokens)
        if blocks is not None:
            held[owner] = blocks
        if held and not keep:
            oldest = next(iter(held))
            if rests:
                pool.idle.rest(CacheUse(), held[oldest])
            pool.release(oldest, REQUEST, held.pop(oldest))
        if wrong < size:
            pool.forget([wrong])
        stored, removed = pool.changes.drain()
        assert not set(stored) & set(removed)
        assert not stored.keys() & mirror.keys()
        assert removed.items() <= mirror.items()
        mirror = {each: row for each, row in (mirror | stored).items() if each not in removed}
        assert mirror == dict(zip(pool.findable(), pool.changes.rows(), strict=True))
        pool.check_integrity()
    for owner, blocks in held.items():
        pool.release(owner, REQUEST, blocks)
    pool.check_integrity()
    assert pool.available == size
