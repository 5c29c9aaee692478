"""Blocks that arrive corrupt again and again: their pair gets no more ships for long, whatever works in between."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.protocol.messages import AttemptFailed, Deviation, StepFrame
from kvferry.router.nodes.circuit_breakers import CircuitBreakers
from kvferry.router.nodes.quarantine import CORRUPT_SHIPS, WITHIN_S, Quarantine
from tests.fake_workers import PROMPT, Bench, collect, decode, expected, first_token, ids, prefill
from tests.waiting import until

P1, P2, D1, D2 = ("p1", 1), ("p2", 1), ("d1", 1), ("d2", 1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_pair_is_shut_at_the_third_corrupt_ship_and_open_again_after_its_time() -> None:
    clock, begun = Clock(), []
    quarantine = Quarantine(clock, lambda: begun.append(1))
    for _ in range(CORRUPT_SHIPS - 1):
        quarantine.corrupt(P1, D1)
        assert not quarantine
    quarantine.corrupt(P1, D1)
    quarantine.corrupt(P1, D1)
    assert quarantine.open() == {(P1, D1)}
    assert len(begun) == 1
    clock.now += WITHIN_S + 1
    assert not quarantine.open()
    assert not quarantine
    quarantine.corrupt(P1, D1)
    assert not quarantine, "what was long ago does not count"


def test_who_has_it_with_two_others_is_shut_for_all() -> None:
    quarantine = Quarantine(Clock())
    quarantine.corrupt(P1, D1)
    quarantine.corrupt(P2, D1)
    quarantine.corrupt(P2, D1)
    assert quarantine.open() == {(None, D1)}
    other = Quarantine(Clock())
    for node in (D1, D2, D2):
        other.corrupt(P1, node)
    assert other.open() == {(P1, None)}


def test_what_works_does_not_end_it() -> None:
    breakers = CircuitBreakers(Clock())
    for _ in range(CORRUPT_SHIPS):
        breakers.pair_failed(P1, D1, certain=False)
        breakers.quarantine.corrupt(P1, D1)
        breakers.pair_works(P1, D1)
    assert breakers.any
    assert breakers.open().pairs == {(P1, D1)}


async def test_requests_over_a_corrupting_pair_are_right_and_then_go_elsewhere() -> None:
    async def corrupting(worker: Any, request: Any) -> Any:
        yield first_token(request.job)
        await asyncio.sleep(0.01)
        yield AttemptFailed(request.job.request_id, request.job.attempt, "blocks_corrupt", "scripted")

    async with Bench([prefill(prefill_script=corrupting), decode()]) as bench:
        for _ in range(CORRUPT_SHIPS + 2):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
            bench.nodes.breakers._pairs.forget((P1, D1))
        assert bench.metrics.quarantines._value.get() == 1
        tried = len(bench["p1"].prefills)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert len(bench["p1"].prefills) == tried, "the decode node computes the prompt itself"


async def test_requests_leave_a_node_whose_ships_are_not_what_others_compute() -> None:
    async with Bench([prefill(), decode()]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        for number in range(CORRUPT_SHIPS):
            assert not bench.nodes.breakers.quarantine
            bench["d1"]._queues["router-test"].put_nowait(StepFrame(deviations=(Deviation(f"r{number}", P1),)))
            await until(lambda count=number + 1: len(bench.nodes.breakers.quarantine._seen) == count)
        assert bench.nodes.breakers.open().pairs == {(P1, D1)}
        tried = len(bench["p1"].prefills)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert len(bench["p1"].prefills) == tried
