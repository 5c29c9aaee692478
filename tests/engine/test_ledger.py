"""The ledger against a naive model: a set of (owner, reason, block) triples."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.engine.block_interfaces import GRANT, QUIESCE, REQUEST, SHIP
from kvferry.engine.ledger import Ledger
from tests.ledger_books import blocks, count, holds_of, owners

NUM_BLOCKS = 8
OWNERS = st.sampled_from(["a", "b", ("peer", 3)])
REASONS = st.sampled_from([REQUEST, GRANT, SHIP, QUIESCE])
IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NUM_BLOCKS)
        self.model: set[tuple[object, str, int]] = set()

    @rule(owner=OWNERS, reason=REASONS, ids=IDS)
    def hold(self, owner, reason, ids):
        wanted = {(owner, reason, i) for i in ids}
        if wanted & self.model:
            with pytest.raises(AssertionError):
                self.ledger.hold(owner, reason, ids)
        else:
            self.ledger.hold(owner, reason, iter(ids))
            self.model |= wanted

    @rule(owner=OWNERS, reason=REASONS, ids=IDS)
    def release_some(self, owner, reason, ids):
        going = {(owner, reason, i) for i in ids}
        if going - self.model:
            with pytest.raises(AssertionError):
                self.ledger.release(owner, reason, ids)
        else:
            self.model -= going
            free = [i for i in ids if all(b != i for _, _, b in self.model)]
            assert self.ledger.release(owner, reason, iter(ids)) == free

    @rule(owner=OWNERS, reason=REASONS)
    def release_all(self, owner, reason):
        going = {t for t in self.model if t[:2] == (owner, reason)}
        self.model -= going
        free = {b for _, _, b in going if all(x != b for _, _, x in self.model)}
        assert set(self.ledger.release(owner, reason)) == free

    @rule(owner=OWNERS, old=REASONS, new=REASONS)
    def move(self, owner, old, new):
        moving = {b for o, r, b in self.model if (o, r) == (owner, old)}
        standing = {b for o, r, b in self.model if (o, r) == (owner, new)}
        if old == new or moving & standing:
            with pytest.raises(AssertionError):
                self.ledger.move(owner, old, new)
        else:
            self.ledger.move(owner, old, new)
            self.model -= {(owner, old, b) for b in moving}
            self.model |= {(owner, new, b) for b in moving}

    @invariant()
    def agrees(self):
        self.ledger.check_integrity()
        for block in range(NUM_BLOCKS):
            holds = [t for t in self.model if t[2] == block]
            assert count(self.ledger, block) == len(holds)
            assert self.ledger.held(block) == bool(holds)
            assert set(holds_of(self.ledger, block)) == {t[:2] for t in holds}
        assert self.ledger.num_held == len({t[2] for t in self.model})
        for reason in (REQUEST, GRANT, SHIP, QUIESCE):
            assert set(owners(self.ledger, reason)) == {o for o, r, _ in self.model if r == reason}


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_a_shared_block_is_free_only_after_its_last_hold():
    ledger = Ledger(4)
    ledger.hold("a", REQUEST, [0, 1])
    ledger.hold("b", REQUEST, [0, 2])
    ledger.hold("a", SHIP, [1])
    assert ledger.release("a", REQUEST) == []
    assert ledger.release("b", REQUEST) == [0, 2]
    assert blocks(ledger, "a", SHIP) == [1]
    assert ledger.release("a", SHIP) == [1]
    assert ledger.num_held == 0


def test_a_refused_hold_or_release_changes_nothing():
    ledger = Ledger(4)
    ledger.hold("a", GRANT, [3])
    with pytest.raises(AssertionError):
        ledger.hold("a", GRANT, [2, 3])
    with pytest.raises(AssertionError):
        ledger.hold("a", GRANT, [1, 4])
    with pytest.raises(AssertionError):
        ledger.release("a", GRANT, [3, 0])
    assert [count(ledger, b) for b in range(4)] == [0, 0, 0, 1]
    ledger.check_integrity()


def test_releasing_all_of_nothing_is_nothing():
    ledger = Ledger(2)
    assert ledger.release("nobody", SHIP) == []
    assert owners(ledger, SHIP) == []
