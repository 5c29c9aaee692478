"""Holds that outlive what they were for are seen, and how long; those that have a cause are not."""

from __future__ import annotations

import pytest

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.engine import Engine
from kvferry.engine.leak_detector import LeakDetector
from kvferry.engine.loop import EngineLoop
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.hashing import chain, root_hash
from tests.toy import expected, finish, make_engine, make_job, tokens_of
from tests.waiting import wait_for

PROMPT = list(range(1, 20))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> Engine:
    return make_engine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def after(leaked: LeakDetector, clock: Clock, seconds: float) -> float:
    leaked.check()
    clock.now += seconds
    leaked.check()
    return leaked.seconds


def test_what_runs_and_what_is_awaited_has_a_cause(engine: Engine, clock: Clock) -> None:
    leaked = LeakDetector(engine, clock)
    engine.add(make_job("runs", PROMPT, max_tokens=30))
    engine.reserve("grant", make_job("granted", PROMPT))
    engine.copies.reserve("copy", chain(root_hash("toy", ""), list(range(40, 60)), 4), 4)
    engine.add(make_job("ships", list(range(100))), transfer=5, prefill_only=True)
    for _ in range(6):
        engine.step()
    assert sum(1 for _ in engine.pool.holds.owners()) == 5
    assert after(leaked, clock, 60.0) == 0
    finish_all(engine)
    assert after(leaked, clock, 60.0) == 0


def finish_all(engine: Engine) -> None:
    engine.withdraw("grant", TransferFailed("gone"))
    engine.transfer_holds.grant_quiet("grant")
    engine.copies.quiet("copy")
    finish(engine)
    engine.transfer_holds.ship_quiet(5)
    engine.check_integrity()


def test_a_grant_that_failed_and_never_gets_quiet(engine: Engine, clock: Clock) -> None:
    leaked = LeakDetector(engine, clock)
    engine.reserve("grant", make_job("granted", PROMPT))
    engine.stepper.admit_grants()
    engine.withdraw("grant", TransferFailed("the link broke"))
    assert after(leaked, clock, 3.0) == 3.0
    assert after(leaked, clock, 4.0) == 7.0
    engine.transfer_holds.grant_quiet("grant")
    assert after(leaked, clock, 5.0) == 0
    engine.check_integrity()


def test_a_ship_whose_request_ended_long_ago(engine: Engine, clock: Clock) -> None:
    leaked = LeakDetector(engine, clock)
    engine.add(make_job("ships", PROMPT, max_tokens=1), transfer=5, prefill_only=True)
    finish(engine)
    assert tokens_of(engine, "ships") == expected(PROMPT, 1)
    assert after(leaked, clock, 9.0) == 9.0
    engine.transfer_holds.ship_quiet(5)
    assert after(leaked, clock, 9.0) == 0


def test_a_hold_of_nobody_is_a_leak(engine: Engine, clock: Clock) -> None:
    detector = LeakDetector(engine, clock)
    leaked = engine.pool.acquire(("nobody", 0), REQUEST, [], 2)
    assert leaked is not None
    assert after(detector, clock, 30.0) == 30.0


def test_it_is_seen_from_another_thread(engine: Engine) -> None:
    engine.pool.acquire(("nobody", 0), REQUEST, [], 2)
    loop = EngineLoop(engine, lambda events: None)
    loop.start()
    try:
        wait_for(lambda: loop.leaked_s() > 0.05, 10)
    finally:
        loop.stop()
