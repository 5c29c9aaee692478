"""Which idle blocks leave first, in long random use: the pool asserts that none leaves before its descendants."""

from __future__ import annotations

import random

import pytest

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.events import Admitted
from kvferry.engine.eviction import PROTECTED, SegmentedLru
from kvferry.engine.ledger import Ledger
from kvferry.engine.ports import REQUEST
from kvferry.protocol.hashing import chain
from tests.toy import finish, make_engine, make_job

BS = 2


@pytest.mark.parametrize("protected", [0, 1, 3, 20])
def test_chains_that_share_beginnings_leave_from_their_ends(protected: int) -> None:
    source = random.Random(protected)
    pool = BlockPool(20, Ledger(20))
    pool.idle = SegmentedLru(protected)
    held: dict[int, list[int]] = {}
    for number in range(2000):
        tokens = [source.randrange(2) for _ in range(BS * source.randint(1, 6))]
        hashes = chain(b"root", tokens, BS)
        reused = pool.match(hashes)
        blocks = pool.acquire(number, REQUEST, reused, len(hashes) - len(reused))
        if blocks is not None:
            pool.idle.found(reused)
            for index in range(len(reused), len(hashes)):
                parent = blocks[index - 1] if index else None
                blocks[index] = pool.register([(number, REQUEST)], blocks[index], hashes[index], parent)
            held[number] = blocks
        if held and (blocks is None or source.random() < 0.7):
            owner = source.choice(list(held))
            pool.release(owner, REQUEST, held.pop(owner))
        if source.random() < 0.02:
            pool.forget([source.randrange(20)])
        pool.check_integrity()
    assert pool.evicted_total > 500


def test_what_is_found_again_beyond_the_protected_is_as_others() -> None:
    idle = SegmentedLru(1)
    idle.found([1, 2])
    for block_id in (1, 2, 3):
        idle.put(block_id)
    assert [idle.pop() for _ in range(3)] == [1, 3, 2]


def test_a_prompt_that_was_found_again_outlives_those_that_were_not() -> None:
    engine = make_engine(num_blocks=2 * PROTECTED)

    def ask(name: str, token_ids: list[int]) -> int:
        engine.add(make_job(name, token_ids, max_tokens=1))
        finish(engine)
        return next(e.hit for e in engine.events if isinstance(e, Admitted) and e.key[0] == name)

    liked, once = list(range(8)), list(range(50, 58))
    assert ask("liked", [*liked, 1]) == 0
    assert ask("liked again", [*liked, 2]) == len(liked)
    assert ask("once", [*once, 1]) == 0
    for number in range(40):
        assert ask(f"other {number}", [99, *[number] * 8]) == 0
    assert ask("liked at last", [*liked, 3]) == len(liked)
    assert ask("once at last", [*once, 2]) == 0
