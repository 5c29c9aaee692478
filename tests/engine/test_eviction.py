"""Which idle blocks leave first: chains from their ends, and what is least likely to be used again soon."""

from __future__ import annotations

import random

import pytest

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.cache_use import CacheUse, Pause
from kvferry.engine.eviction import CLASSES, COPIED, REMEMBERED, SESSIONS, ValueEviction
from kvferry.engine.ledger import Ledger
from kvferry.protocol.hashing import chain

BS = 2


class House:
    """A pool whose requests take no time, on a clock of its own."""

    def __init__(self, blocks: int) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks, Ledger(blocks))
        self.pool.idle = self.idle = ValueEviction(blocks, lambda: self.now)
        self.asked = 0

    def ask(self, tokens: list[int], *, reason: Pause = Pause.ANSWERED, tenant: str = "", session: str = "") -> int:
        """Run a request; return how many of its blocks were found."""
        self.asked += 1
        hashes = chain(b"root", tokens, BS)
        reused, own = self.pool.match(hashes), CacheUse(tenant, session, str(self.asked), pause=reason)
        blocks = self.pool.acquire(
            self.asked, REQUEST, reused, len(hashes) - len(reused), cache_use=own, hashes=hashes
        )  # fmt: skip
        assert blocks is not None
        for index in range(len(reused), len(hashes)):
            parent = blocks[index - 1] if index else None
            blocks[index] = self.pool.register([(self.asked, REQUEST)], blocks[index], hashes[index], parent)
        self.idle.rest(own, blocks)
        self.pool.release(self.asked, REQUEST, blocks)
        return len(reused)

    def here(self, tokens: list[int]) -> int:
        """Return how many of a prompt's blocks are in the pool."""
        return len(self.pool.match(chain(b"root", tokens, BS)))


def prompt(first: int, blocks: int) -> list[int]:
    return [first, *range(1000, 999 + blocks * BS)]


def test_chains_that_share_beginnings_leave_from_their_ends() -> None:
    source, now = random.Random(0), 0.0
    pool = BlockPool(20, Ledger(20))
    pool.idle = idle = ValueEviction(20, lambda: now)
    held: dict[int, tuple[list[int], CacheUse]] = {}
    for number in range(3000):
        now += source.expovariate(0.5)
        tokens = [source.randrange(2) for _ in range(BS * source.randint(1, 6))]
        hashes = chain(b"root", tokens, BS)
        reused = pool.match(hashes)
        cache_use = CacheUse(source.choice("ab"), source.choice(["", "s", "t"]), str(number))
        fresh = len(hashes) - len(reused)
        blocks = pool.acquire(number, REQUEST, reused, fresh, cache_use=cache_use, hashes=hashes)
        if blocks is not None:
            for index in range(len(reused), len(hashes)):
                parent = blocks[index - 1] if index else None
                blocks[index] = pool.register([(number, REQUEST)], blocks[index], hashes[index], parent)
            held[number] = blocks, cache_use
        if held and (blocks is None or source.random() < 0.7):
            owner = source.choice(list(held))
            blocks, cache_use = held.pop(owner)
            if source.random() < 0.9:
                idle.rest(cache_use, blocks)
            pool.release(owner, REQUEST, blocks)
            if source.random() < 0.3:
                idle.pause(str(owner), Pause.TOOL)
        if source.random() < 0.02:
            pool.forget([source.randrange(20)])
        if source.random() < 0.02:
            idle.close("s")
        pool.check_integrity()
        chains = {id(each): each for each in idle._chains if each is not None}.values()
        assert sum(each.idle for each in chains) == len(idle)
        assert sum(each.dropped for each in {*idle._remembered.values()}) == len(idle._remembered) <= REMEMBERED * 20
    assert pool.evicted_total > 500
    assert sum(idle.stats.evicted.values()) == pool.evicted_total
    assert (
        min(
            idle.stats.evicted["closed"],
            idle.stats.evicted["shared"],
            idle.stats.returns["kept"],
            idle.stats.returns["lost"],
        )
        > 0
    )


def test_before_anything_is_learned_the_longest_idle_leaves_first() -> None:
    house = House(8)
    for first in range(3):
        house.ask(prompt(first, 2))
        house.now += 2
    house.ask(prompt(9, 4))
    assert [house.here(prompt(first, 2)) for first in range(3)] == [0, 2, 2]


def test_sessions_that_run_tools_outlive_later_requests_that_never_come_back() -> None:
    """LRU would lose the long history to forty requests that come once."""
    house = House(60)
    history = prompt(0, 20)
    found = []
    for turn in range(30):
        found.append(house.ask(history + [7] * turn * BS, reason=Pause.TOOL))
        for _ in range(20):
            house.now += 1
            house.ask(prompt(house.asked + 10, 3))
    assert found[-15:] == [19 + turn for turn in range(15, 30)], "after some turns nothing of it leaves any more"


def test_a_session_stays_for_as_long_as_its_tools_usually_take() -> None:
    house = House(80)
    for number in range(25):
        for turn in range(5):
            house.ask(prompt(number, 5) + [7] * turn * BS, reason=Pause.TOOL)
            house.now += 10
    late, soon = prompt(500, 20), prompt(501, 20)
    house.ask(late, reason=Pause.TOOL)
    house.now += 600
    house.ask(soon, reason=Pause.TOOL)
    house.now += 8
    house.ask(prompt(502, 60))
    assert (house.here(late), house.here(soon)) == (0, 20), "tools take ten seconds here, never ten minutes"


def test_tasks_that_end_after_six_turns_give_way_after_the_sixth() -> None:
    """Classes by the logarithm of turns could not tell the fifth turn from the sixth."""
    house = House(80)
    for number in range(30):
        for turn in range(6):
            house.ask(prompt(number, 5) + [7] * turn * BS, reason=Pause.TOOL)
            house.now += 10
        house.now += 50
    ended, goes_on = prompt(500, 5), prompt(501, 5)
    for turn in range(6):
        house.ask(ended + [7] * turn * BS, reason=Pause.TOOL)
        if turn:
            house.ask(goes_on + [7] * (turn - 1) * BS, reason=Pause.TOOL)
        house.now += 5 if turn == 5 else 10
    house.ask(prompt(900, 68))
    assert house.here(goes_on) == 5 > house.here(ended)


def test_tools_are_told_apart_by_how_long_they_take() -> None:
    house = House(60)
    for number in range(60):
        house.ask(prompt(number, 4))
        house.idle.pause(str(house.asked), Pause.TOOL, 1 + number % 2)
        house.now += 40 if number % 2 else 2
        house.ask([*prompt(number, 4), 7, 7])
        house.now += 100
    slow, is_fast = prompt(900, 20), prompt(901, 20)
    for group, tokens in ((2, slow), (1, is_fast)):
        house.ask(tokens)
        house.idle.pause(str(house.asked), Pause.TOOL, group)
    house.now += 1
    house.ask(prompt(902, 35))
    assert (house.here(slow), house.here(is_fast)) == (5, 20), "one takes another 39 s, one is soon back"


def test_why_a_session_pauses_is_told_afterwards() -> None:
    house = House(60)
    for _ in range(40):
        first = house.asked + 10
        house.ask(prompt(first, 4))
        house.idle.pause(str(house.asked), Pause.TOOL)
        house.now += 1
        house.ask(prompt(house.asked + 1000, 4))  # an answer, and its client does not come back
        house.now += 2
        house.ask(prompt(first, 4))
    answered, calls = prompt(9000, 20), prompt(9001, 20)
    house.ask(calls)
    house.idle.pause(str(house.asked), Pause.TOOL)
    house.ask(answered)
    house.idle.pause("nobody", Pause.TOOL)
    house.now += 2
    house.ask(prompt(9002, 35))
    assert house.here(calls) == 20
    assert house.here(answered) < 20


def test_what_a_closed_session_leaves_goes_first_except_what_others_share() -> None:
    house = House(30)
    common = prompt(0, 4)
    house.ask([*common, *[1] * 8], session="other")
    house.now += 1
    house.ask(prompt(5, 6))
    house.now += 1
    house.ask([*common, *[2] * 12], session="mine")
    for name in ("nobody", "mine", "mine"):
        house.idle.close(name)
    house.ask(prompt(6, 10 + 6))
    assert house.here([*common, *[2] * 12]) == 4
    assert house.here([*common, *[1] * 8]) == 8
    assert house.here(prompt(5, 6)) == 6
    assert house.idle.stats.evicted["closed"] == 6
    house.pool.check_integrity()


def test_a_prefix_stays_as_long_as_any_of_its_sessions() -> None:
    house = House(24)
    common = prompt(0, 6)
    house.ask([*common, *[1] * 4])
    house.now += 5
    house.ask([*common, *[2] * 4])
    house.ask(prompt(5, 14))
    house.ask(prompt(6, 14))
    assert house.here(common) in (0, 6), "a part alone would have no use"
    house.pool.check_integrity()


@pytest.mark.parametrize("name", ["", "mine"])
def test_first_prompts_of_sessions_outlive_later_prompts_that_come_once(name: str) -> None:
    """Both were of one class, so that prompts that nobody continues looked like half of a session."""
    house = House(60)
    for number in range(40):
        common, session = ([], f"{name}{number}") if name else (prompt(0, 4), "")
        task = [*common, *[2000 + number] * 8]
        house.ask(task, session=session)
        house.now += 5
        house.ask([*task, 7, 7], session=session)
        house.ask(prompt(500 + number, 6))
        house.now += 60
    first = [*([] if name else prompt(0, 4)), *[9000] * 40]
    house.ask(first, session=name)
    once = prompt(9001, 20)
    house.ask(once)
    house.ask(prompt(9002, 60 - 24 - 10))
    assert house.here(first) == len(first) // BS
    assert house.here(once) < 20


def test_blocks_worth_less_than_those_being_evicted_leave_next() -> None:
    """The chain of an eviction lost all of its blocks before any other, even before blocks that were given up."""
    house = House(20)
    hashes = chain(b"root", prompt(7, 4), BS)
    blocks = house.pool.acquire("running", REQUEST, [], 4)
    assert blocks is not None
    for index, block_hash in enumerate(hashes):
        house.pool.register([("running", REQUEST)], blocks[index], block_hash, blocks[index - 1] if index else None)
    house.ask(prompt(0, 10))
    house.now += 5
    house.ask(prompt(1, 8))
    assert house.here(prompt(0, 10)) == 8, "it is being evicted"
    house.idle.evict_first(blocks)
    house.pool.release("running", REQUEST, blocks)
    house.ask(prompt(2, 4))
    assert (house.here(prompt(0, 10)), house.here(prompt(7, 4))) == (8, 0)


def test_copies_without_a_request_may_leave() -> None:
    house = House(6)
    blocks = house.pool.acquire("copy", REQUEST, [], 4)
    assert blocks is not None
    hashes = chain(b"root", prompt(0, 4), BS)
    for index, block_hash in enumerate(hashes):
        house.pool.register([("copy", REQUEST)], blocks[index], block_hash, blocks[index - 1] if index else None)
    house.pool.release("copy", REQUEST, blocks)
    house.ask(prompt(1, 5))
    assert house.idle.stats.evicted == {COPIED: 3}


def test_memory_is_bounded() -> None:
    house = House(4)
    for number in range(SESSIONS + 100):
        house.now += 30
        house.ask(prompt(number, 1), tenant=f"t{number}", session=f"s{number}")
    assert len(house.idle._sessions) == len(house.idle._requests) == SESSIONS
    assert len(house.idle._classes._classes) == CLASSES
    assert len(house.idle._remembered) == REMEMBERED * 4
    assert len(house.idle._aged._timers) < 200
