"""A late attempt gets another beside it; the first token wins, and neither leaves anything behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvferry.router.dispatch.hedging
from kvferry.placement.types import Placement
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.lease import Load, Rates
from kvferry.protocol.messages import AttemptFailed, PrefillRequest, Pulse
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.hedging import late_s, ship_late_s
from kvferry.router.dispatch.interface import Delivered
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.dispatch.timers import Timer, Timers
from tests.fake_workers import (
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    first_token,
    honest_prefill,
    ids,
    lease_of,
    prefill,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 0.2)


async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


def after(seconds: float, script: Any = honest_prefill) -> Any:
    async def slow(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        await asyncio.sleep(seconds)
        async for answer in script(worker, request):
            yield answer

    return slow


async def refuse(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield AttemptFailed(request.job.request_id, request.job.attempt, "server_error", "scripted")


async def hedged_once(bench: Bench) -> RequestDispatch:
    """A request that is answered soon, by a second attempt."""
    began = asyncio.get_running_loop().time()
    dispatch = bench.start(6)
    assert ids(await collect(dispatch)) == expected(PROMPT, 6)
    assert asyncio.get_running_loop().time() - began < 1.5
    assert bench.retries() == {"hedge": 1}
    return dispatch


async def test_another_pair_takes_over_from_a_prefill_node_that_says_nothing() -> None:
    """It had taken half of the request's deadline."""
    workers = [prefill("p1", prefill_script=hang), prefill("p2"), decode("d1"), decode("d2")]
    async with Bench(workers) as bench:
        dispatch = await hedged_once(bench)
        assert dispatch.route.prefill == "p2"
        (late,), (won,) = bench["p1"].prefills, bench["p2"].prefills
        assert late.target.node_id != won.target.node_id
        assert won.job.failures == 0, "a crowd's second attempts had gone ahead of everybody"
        assert dispatch.fork.request_id == won.job.request_id != late.job.request_id
        await until(lambda: bench["p1"].answering == 0)
        assert [cancel.request_id for cancel in bench["p1"].cancels] == [late.job.request_id]
        assert not bench["p2"].cancels


async def test_the_only_decode_node_computes_by_itself() -> None:
    async with Bench([prefill("p1", prefill_script=hang), decode()]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {"hedge": 1}
        assert bench.placements() == {"remote": 1, "local": 1}, "both attempts of one request"
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.nodes.breakers.open().nodes == {("p1", 1)}, "late twice"
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {"hedge": 2}


@pytest.mark.parametrize("free", [10, 20])
async def test_nobody_is_doubted_who_waits_for_room_on_a_decode_node(free: int, monkeypatch) -> None:
    """A crowd had every prefill node shut for seconds, and decode nodes that were full computed prompts besides."""
    queue = 2 if free == 10 else 0
    load = Load(queue, active_blocks=60 - free, granted_blocks=40, free_blocks=free, total_blocks=100)
    async with Bench([prefill("p1", prefill_script=after(0.6)), decode(changes={"load": load})]) as bench:
        doubted: list[tuple[str, int]] = []
        monkeypatch.setattr(bench.nodes.breakers, "node_failed", lambda node, *, certain: doubted.append(node))
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert doubted == ([] if free == 10 else [("p1", 1)])


async def test_the_late_one_may_win() -> None:
    workers = [prefill("p1", prefill_script=after(0.5)), prefill("p2", prefill_script=after(2)), decode()]
    async with Bench(workers) as bench:
        dispatch = bench.start(8)
        assert ids(await collect(dispatch)) == expected(PROMPT, 8)
        assert dispatch.route.prefill == "p1"
        await until(lambda: bench["p2"].answering == 0)
        assert [cancel.request_id for cancel in bench["p2"].cancels] == [bench["p2"].prefills[0].job.request_id]
        assert not bench["p1"].cancels


@pytest.mark.parametrize(("first", "second"), [(after(0.4, refuse), after(0.3)), (after(0.5), after(0.1, refuse))])
async def test_where_one_of_both_fails_the_other_goes_on(first: Any, second: Any) -> None:
    workers = [prefill("p1", prefill_script=first), prefill("p2", prefill_script=second), decode("d1"), decode("d2")]
    async with Bench(workers) as bench:
        assert ids(await collect(bench.start(8))) == expected(PROMPT, 8)
        assert bench.retries()["hedge"] == 1
        assert len(bench["p1"].prefills) == len(bench["p2"].prefills) == 1


async def test_the_attempt_that_is_left_after_the_other_failed_may_be_late_too() -> None:
    """Nobody looked at it again: it had half of the request's deadline."""
    scripts = [after(0.5, refuse), hang, honest_prefill]

    async def in_turn(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        async for answer in scripts.pop(0)(worker, request):
            yield answer

    workers = [prefill(name, prefill_script=in_turn) for name in ("p1", "p2", "p3")]
    async with Bench([*workers, decode("d1"), decode("d2")]) as bench:
        assert ids(await collect(bench.start(8))) == expected(PROMPT, 8)
        assert bench.retries()["hedge"] == 2


def ship_after(seconds: float) -> Any:
    async def first_only(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield first_token(request.job)
        await asyncio.sleep(seconds)
        worker.peers[request.target.node_id].decode(request.job, 1)
        yield SILENCE

    return first_only


async def test_one_whose_blocks_do_not_arrive_after_its_first_token_is_late_again() -> None:
    """It stood still for as long as a slow link took."""
    workers = [prefill("p1", prefill_script=ship_after(60)), prefill("p2"), decode("d1"), decode("d2")]
    async with Bench(workers) as bench:
        dispatch = await hedged_once(bench)
        (first,), (second,) = bench["p1"].prefills, bench["p2"].prefills
        assert second.job.token_ids == (*PROMPT, expected(PROMPT, 1)[0]), "behind the token that is out"
        assert dispatch.route.prefill == "p1"
        assert second.target.node_id != first.target.node_id


async def test_a_late_ship_s_second_attempt_avoids_nodes_that_may_hang() -> None:
    """It went to another prefill node with a decode node that was known to hang, since both differed from the first."""

    async def commits_nothing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        if request.target.node_id == "d1" and worker.node_id == "p2":
            async for answer in honest_prefill(worker, request):
                yield answer
            return
        yield first_token(request.job)
        yield SILENCE

    workers = [prefill("p1", prefill_script=commits_nothing), decode("d1")]
    async with Bench(workers) as bench:
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: bench["p1"].prefills)
        await bench.add(prefill("p2", prefill_script=commits_nothing))
        await bench.add(decode("d2"))
        await until(lambda: ("p2", 1) in bench.nodes.entries and bench.nodes.entries["p2", 1].open)
        await until(lambda: ("d2", 1) in bench.nodes.entries and bench.nodes.entries["d2", 1].open)
        bench["d2"].pulse = Pulse(engine_s=0.9, usual_s=0.02)
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"hedge": 1}
        assert not bench["d2"].jobs


async def test_a_ship_is_late_however_long_its_prompt_waited_for_its_turn() -> None:
    """A prompt that had waited for seconds behind others was given three times as long for its blocks' way."""
    place = Placement(lease_of("p1", "prefill"), lease_of("d1", "decode"), 0, 3.1, 3.0, queue_s=2.95)
    assert late_s(place) > 8
    assert ship_late_s(place) < 0.5


async def test_blocks_that_do_not_arrive_make_the_pair_doubtful_and_not_the_node_that_computed_them() -> None:
    """Two of them on a slow link had the prefill node shut for all decode nodes."""
    async with Bench([prefill("p1", prefill_script=ship_after(60)), decode("d1"), decode("d2")]) as bench:
        for _ in range(2):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {"hedge": 2}
        assert not bench.nodes.breakers.open().nodes
        used = [request.target.node_id for request in bench["p1"].prefills]
        pairs = {(("p1", 1), (name, 1)) for name in used if used.count(name) > 1}
        assert bench.nodes.breakers.open().pairs == pairs


async def test_one_whose_blocks_arrive_in_time_is_not_late() -> None:
    async with Bench([prefill("p1", prefill_script=ship_after(0.1)), prefill("p2"), decode()]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {}


async def test_a_decode_node_of_long_steps_is_not_late_with_its_first_one() -> None:
    """Steps of 0.9 s under 2,000 streams made the only pair doubtful, and a request ended with no_nodes."""
    slow = {"rates": Rates(step_s=0.3)}
    async with Bench([prefill("p1", prefill_script=ship_after(0.5)), decode(changes=slow)]) as bench:
        for _ in range(2):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {}
        assert not bench.nodes.breakers.open().pairs


async def test_nothing_is_hedged_beyond_the_budget() -> None:
    async with Bench([prefill("p1", prefill_script=after(0.6)), prefill("p2"), decode()]) as bench:
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {}


async def test_what_has_not_begun_waits_for_the_budget_and_hears_in_time_that_there_is_none() -> None:
    async with Bench([prefill(prefill_script=refuse), decode()], max_wait_s=0.3) as bench:
        bench.cluster.retries = RetryBudget(0.0, 0.0, 0.0)
        with pytest.raises(Overloaded, match="retry budget") as caught:
            await collect(bench.start(6))
        assert caught.value.retry_after
        bench.cluster.retries = RetryBudget(0.0, 20.0, 1.0)
        for _ in range(3):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)


async def test_what_would_begin_after_its_deadline_is_refused_at_once() -> None:
    busy = Load(waiting_tokens=5000, free_blocks=1000, total_blocks=1000)
    slow = {"load": busy, "rates": Rates(prefill_tokens_per_s=100.0)}
    async with Bench([prefill(changes=slow), decode(changes=slow)]) as bench:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Overloaded, match="deadline") as caught:
            await collect(bench.start(6, deadline_s=20))
        assert asyncio.get_running_loop().time() - began < 1
        assert caught.value.retry_after == 30.0
        assert ids(await collect(bench.start(6, deadline_s=100))) == expected(PROMPT, 6)


@pytest.mark.parametrize("first_s", [-1.0, 20.0])
async def test_what_would_miss_its_target_is_refused_at_once_and_what_has_begun_is_not(first_s: float) -> None:
    busy = Load(waiting_tokens=5000, free_blocks=1000, total_blocks=1000)
    slow = {"load": busy, "rates": Rates(prefill_tokens_per_s=100.0)}
    async with Bench([prefill(changes=slow), decode(changes=slow)]) as bench:
        with pytest.raises(Overloaded, match="target") as caught:
            await collect(bench.start(6, first_s=first_s))
        assert caught.value.retry_after == 30.0
        begun = Delivered(tuple(expected(PROMPT, 6)[:2]))
        assert ids(await collect(bench.start(6, first_s=first_s, delivered=begun))) == expected(PROMPT, 6)[2:]
        assert ids(await collect(bench.start(6, first_s=100))) == expected(PROMPT, 6)


async def test_what_was_late_and_got_on_is_late_no_more() -> None:
    """A router that stood still reads of both at once, and judges nobody by its own pause."""
    step: list[Timer] = []
    alarms = Timers(asyncio.get_running_loop().time() + 60, step.append)
    alarms.expect(0.02)
    assert not alarms.late
    await until(lambda: step)
    assert (step, alarms.late) == ([Timer.LATE], True)
    alarms.progressed()
    assert not alarms.late
    alarms.expect(0.02)
    alarms.progressed()
    await asyncio.sleep(0.05)
    assert step == [Timer.LATE]
    alarms.stop()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_a_share_of_requests_and_a_floor_per_second() -> None:
    clock = Clock()
    budget = RetryBudget(0.1, 2.0, 5.0, clock)
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    clock.now = 0.5
    assert [budget.spend() for _ in range(2)] == [True, False]
    budget.requests += 30
    assert [budget.spend() for _ in range(4)] == [True] * 3 + [False]
    clock.now = 1000.0
    budget.requests += 1000
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False], "what was not used is not kept for ever"


@pytest.mark.parametrize(("deadline_s", "blamed"), [(0.5, False), (4.0, True)])
async def test_a_node_is_not_blamed_for_a_request_that_was_nearly_out_of_time(
    deadline_s: float, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt is given up after half of what is left; every client with a short timeout had shut a node for all."""
    async with Bench([prefill("p1", prefill_script=hang), decode()]) as bench:
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        monkeypatch.setattr(bench.nodes.breakers, "late", lambda place, *, ships: None)
        monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 1.0)
        answer = asyncio.create_task(collect(bench.start(6, deadline_s=deadline_s)))
        await until(lambda: bench["p1"].prefills and not bench["p1"].answering)
        assert (("p1", 1) in bench.nodes.breakers.open().nodes) == blamed
        await asyncio.gather(answer, return_exceptions=True)
