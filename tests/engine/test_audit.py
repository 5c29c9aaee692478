"""The audit of the books in pieces: silent while the pool is in use, and it finds whatever is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import audit_counts
from kvferry.engine.block_interfaces import GRANT, QUIESCE, REQUEST, SHIP
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.eviction import ValueEviction
from kvferry.engine.ledger import Ledger
from kvferry.protocol.hashing import chain
from kvferry.protocol.layout import blocks_for
from kvferry.worker.event_relay import block_books
from tests.toy import make_engine


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_counts, "STRIDE", 2)


class Used:
    """A pool of 12 blocks: `a` holds the chain 0 … 3, of which three are findable; the chain 4 … 6 is cached; a grant
    holds 7; the rest is free."""

    def __init__(self) -> None:
        self.ledger = Ledger(12)
        self.pool = BlockPool(12, self.ledger)
        self.held = self.take("a", [1, 2, 3, 4, 5, 6, 7])
        cached = self.take("b", [9, 9, 9, 9, 9, 9])
        self.pool.release("b", REQUEST, cached)
        granted = self.pool.acquire("g", GRANT, [], 1)
        assert (self.held, cached, granted) == ([0, 1, 2, 3], [4, 5, 6], [7])

    def take(self, owner: str, tokens: list[int]) -> list[int]:
        blocks = self.pool.acquire(owner, REQUEST, [], blocks_for(len(tokens), 2))
        assert blocks is not None
        for i, block_hash in enumerate(chain(b"root", tokens, 2)):
            blocks[i] = self.pool.register([(owner, REQUEST)], blocks[i], block_hash, blocks[i - 1] if i else None)
        return blocks


def order(used: Used) -> ValueEviction:
    assert isinstance(used.pool.idle, ValueEviction)
    return used.pool.idle


def lose_free(used: Used) -> None:
    used.pool._free.take()


def free_held(used: Used) -> None:
    used.pool._free.put(2)


def free_twice(used: Used) -> None:
    used.pool._free._ids.append(10)


def free_cached(used: Used) -> None:
    used.pool._free.put(5)


def lose_cached(used: Used) -> None:
    used.pool.idle.remove(6)


def cache_a_stranger(used: Used) -> None:
    order(used)._idle.add(99)


def lose_leaf(used: Used) -> None:
    idle = order(used)._chains[6]
    assert idle is not None
    idle.leaves.clear()


def forget_hash(used: Used) -> None:
    used.pool._blocks[6].hash = None


def leave_hash_on_free(used: Used) -> None:
    used.pool._blocks[11].hash = b"left"


def lose_from_index(used: Used) -> None:
    del used.pool._by_hash[used.pool._blocks[1].hash]  # type: ignore[arg-type]


def cross_index(used: Used) -> None:
    used.pool._by_hash[used.pool._blocks[1].hash] = 2  # type: ignore[index]


def outlive_parent(used: Used) -> None:
    used.pool._blocks[6].parent = 9


def more_children(used: Used) -> None:
    used.pool._blocks[0].children += 1


def fewer_children(used: Used) -> None:
    used.pool._blocks[4].children -= 1


def count_more(used: Used) -> None:
    used.ledger._counts[2] += 1


def count_less(used: Used) -> None:
    used.ledger._counts[7] -= 1


def count_held_wrong(used: Used) -> None:
    used.ledger._num_held += 1


def lose_page(used: Used) -> None:
    del used.ledger._pages[GRANT]["g"]


def lose_hold(used: Used) -> None:
    del used.ledger._pages[REQUEST]["a"][3]


def invent_hold(used: Used) -> None:
    used.ledger._pages[GRANT]["g"][8] = None


def empty_page(used: Used) -> None:
    used.ledger._pages[GRANT]["h"] = {}


def empty_book(used: Used) -> None:
    used.ledger._pages["nothing"] = {}


DAMAGES = [
    lose_free,
    free_held,
    free_twice,
    free_cached,
    lose_cached,
    cache_a_stranger,
    lose_leaf,
    forget_hash,
    leave_hash_on_free,
    lose_from_index,
    cross_index,
    outlive_parent,
    more_children,
    fewer_children,
    count_more,
    count_less,
    count_held_wrong,
    lose_page,
    lose_hold,
    invent_hold,
    empty_page,
    empty_book,
]


def finish(audit: Iterator[None]) -> None:
    for _ in audit:
        pass


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found_by_a_whole_pass(damage: Callable[[Used], None]) -> None:
    used = Used()
    used.pool.check_integrity()
    damage(used)
    with pytest.raises(AssertionError):
        used.pool.check_integrity()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_happens_during_a_pass_is_found_by_that_pass_or_the_next(damage: Callable[[Used], None]) -> None:
    total = sum(1 for _ in Used().pool.audit())
    for when in range(total):
        used = Used()
        audit = used.pool.audit()
        for _ in range(when + 1):
            next(audit)
        damage(used)
        with pytest.raises(AssertionError):
            finish(itertools.chain(audit, used.pool.audit()))


def test_a_pass_has_many_pieces_and_leaves_nothing_behind() -> None:
    used = Used()
    audit = used.pool.audit()
    for _ in range(8):
        next(audit)
    audit.close()  # type: ignore[attr-defined]
    finish(used.pool.audit())
    assert used.pool._recounts == []
    assert used.ledger._recounts == []
    assert sum(1 for _ in used.pool.audit()) > 12 * 3 // 2


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9)
actions = st.lists(st.tuples(st.sampled_from(["take", "drop", "quiesce", "ship", "audit"]), sequences), max_size=60)


@settings(max_examples=200, deadline=None)
@given(actions, st.integers(2, 11))
def test_a_pool_in_use_is_never_accused(actions: list[tuple[str, list[int]]], size: int) -> None:
    ledger = Ledger(size)
    pool = BlockPool(size, ledger)
    held: dict[object, tuple[str, list[int]]] = {}
    audit = pool.audit()
    for number, (action, tokens) in enumerate(actions):
        oldest = next(iter(held), None)
        if action == "take":
            hashes = chain(b"root", tokens, 2)
            reused = pool.match(hashes)
            blocks = pool.acquire(number, REQUEST, reused, blocks_for(len(tokens), 2) - len(reused))
            if blocks is not None:
                held[number] = (REQUEST, blocks)
                for i in range(len(reused), len(hashes)):
                    parent = blocks[i - 1] if i else None
                    blocks[i] = pool.register([(number, REQUEST)], blocks[i], hashes[i], parent)
        elif oldest is not None and action == "drop":
            reason, blocks = held.pop(oldest)
            pool.release(oldest, reason, blocks)
        elif oldest is not None and action == "quiesce" and held[oldest][0] == REQUEST:
            ledger.move(oldest, REQUEST, QUIESCE)
            held[oldest] = (QUIESCE, held[oldest][1])
        elif oldest is not None and action == "ship" and ("ship", oldest) not in held:
            ledger.hold(("ship", oldest), SHIP, held[oldest][1])
            held["ship", oldest] = (SHIP, list(held[oldest][1]))
        for _ in range(len(tokens)):
            if next(audit, "ended") == "ended":
                audit = pool.audit()
    finish(audit)
    pool.check_integrity()


def test_a_block_that_nobody_knows_of_is_missed_in_the_sum() -> None:
    """What is active had been what remains, so that the books of a node balanced whatever was lost."""
    engine = make_engine()
    books = block_books(engine.load())
    assert sum(books.values()) == engine.pool.num_blocks
    engine.pool._free.take()
    books = block_books(engine.load())
    assert sum(books.values()) == engine.pool.num_blocks - 1
    assert not books["active"]
