"""Turns: who waits, for how long, and who is sent away."""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import Any

import pytest

from kvferry.placement.capacity import Capacity
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants import scheduler_slots as turns_module
from kvferry.router.tenants.scheduler_slots import SchedulerSlots, Size, ThroughputEstimate
from kvferry.router.tenants.tenant import Tenant
from tests.crowded import in_time
from tests.waiting import until

A, B = Tenant("a"), Tenant("b")
SIZE = Size(1, 100, 10)


def call(seconds: float = 60.0, priority: int = 0, first_s: float = inf) -> RequestContext:
    now = time.monotonic()
    return RequestContext("c", arrival=now, deadline=now + seconds, priority=priority, first_by=now + first_s)


class Queue:
    """Turns over nodes that take so many sequences."""

    def __init__(self, sequences: int, *, shared: bool = False, most_queued: int = 512) -> None:
        self.capacity = Capacity(sequences, 1e9)
        self.metrics = RouterMetrics()
        self.turns = SchedulerSlots(lambda: self.capacity, self.metrics, shared=lambda: shared, most_queued=most_queued)

    def waiting(self) -> float:
        return self.metrics.registry.get_sample_value("kvferry_requests_queued") or 0.0


async def test_without_contention_a_turn_is_there_without_a_pause() -> None:
    queue = Queue(1)
    taking = queue.turns.take(A, call(), SIZE)
    with pytest.raises(StopIteration):  # it ran to its end and never gave up control
        taking.send(None)


async def test_nodes_that_do_not_tell_hold_nobody_back() -> None:
    queue = Queue(0, shared=True)
    assert len([await queue.turns.take(A, call(), SIZE) for _ in range(100)]) == 100
    assert queue.waiting() == 0


async def test_who_waits_begins_when_another_ends_in_fair_order() -> None:
    queue = Queue(2, shared=True)
    first = await queue.turns.take(A, call(), SIZE)
    order: list[str] = []

    async def take(tenant: Tenant, priority: int = 0) -> None:
        turn = await queue.turns.take(tenant, call(priority=priority), SIZE)
        order.append(f"{tenant.name}{priority}")
        await asyncio.sleep(0.01)
        queue.turns.end(turn, 100, 10)

    flood = [asyncio.create_task(take(A, number)) for number in (2, 1, 0)]
    await until(lambda: queue.waiting() == 3)
    other = asyncio.create_task(take(B))
    await other
    assert order == ["b0"]
    queue.turns.end(first, 100, 10)
    await asyncio.gather(*flood)
    assert order == ["b0", "a0", "a1", "a2"]
    assert queue.waiting() == 0


async def test_who_leaves_while_it_waits_takes_no_turn() -> None:
    queue = Queue(1, shared=True)
    first = await queue.turns.take(A, call(), SIZE)
    tasks = [asyncio.create_task(queue.turns.take(A, call(), SIZE)) for _ in range(2)]
    await until(lambda: queue.waiting() == 2)
    tasks[0].cancel()
    await until(lambda: queue.waiting() == 1)
    queue.turns.end(first, 100, 10)
    queue.turns.end(await tasks[1], 100, 10)
    assert (await queue.turns.take(A, call(), SIZE)).begun


async def test_a_turn_that_came_as_its_client_left_is_given_back() -> None:
    queue = Queue(1, shared=True)
    first = await queue.turns.take(A, call(), SIZE)
    task = asyncio.create_task(queue.turns.take(A, call(), SIZE))
    await until(lambda: queue.waiting() == 1)
    queue.turns.end(first, 100, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asyncio.wait_for(queue.turns.take(A, call(), SIZE), 1)).begun


async def test_the_queue_of_a_tenant_is_bounded_and_another_s_is_its_own() -> None:
    queue = Queue(1, shared=True, most_queued=2)
    first = await queue.turns.take(A, call(), SIZE)
    tasks = [asyncio.create_task(queue.turns.take(A, call(), SIZE)) for _ in range(2)]
    await until(lambda: queue.waiting() == 2)
    with pytest.raises(Overloaded, match="2 requests are queued") as caught:
        await queue.turns.take(A, call(), SIZE)
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1
    assert (await queue.turns.take(B, call(), SIZE)).begun
    for task in tasks:
        task.cancel()
    queue.turns.end(first, 0, 0)


@pytest.mark.parametrize("bound", [{"seconds": 0.05}, {"first_s": 0.05}])
async def test_a_deadline_or_target_that_passes_in_the_queue_is_a_429(bound: dict[str, Any]) -> None:
    queue = Queue(1, shared=True)
    await queue.turns.take(A, call(), SIZE)
    with pytest.raises(Overloaded, match="its deadline or its tenant's target"):
        await queue.turns.take(A, call(**bound), SIZE)
    assert queue.waiting() == 0


async def test_a_deadline_that_cannot_be_met_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate at which work is done is learned; then a request that would wait for longer than it may is sent away
    with the time after which it would do."""
    monkeypatch.setattr(turns_module, "MIN_OBSERVED_S", 0.05)
    queue = Queue(1, shared=True)
    turn = await queue.turns.take(A, call(), SIZE)
    tasks = [asyncio.create_task(queue.turns.take(A, call(), SIZE)) for _ in range(40)]
    await until(lambda: queue.waiting() == 40)
    for task in tasks[:10]:
        await asyncio.sleep(0.02)
        queue.turns.end(turn, 100, 10)
        turn = await task
    began = time.monotonic()
    with pytest.raises(Overloaded, match="before its deadline") as caught:
        await queue.turns.take(A, call(0.4), SIZE)
    assert in_time(time.monotonic() - began, 0.2)
    assert caught.value.retry_after is not None
    assert 1.0 <= caught.value.retry_after < 60.0
    for task in tasks[10:]:
        task.cancel()


async def test_who_waits_hears_that_its_turn_will_be_too_late_once_that_can_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rate was not known when it came: it had waited until its deadline."""
    monkeypatch.setattr(turns_module, "MIN_OBSERVED_S", 0.2)
    monkeypatch.setattr(turns_module, "CHECK_S", 0.05)
    queue = Queue(1, shared=True)
    turn = await queue.turns.take(A, call(), SIZE)
    tasks = [asyncio.create_task(queue.turns.take(A, call(), SIZE)) for _ in range(200)]
    await until(lambda: queue.waiting() == 200)
    late = asyncio.create_task(queue.turns.take(A, call(3.0), SIZE))
    began = time.monotonic()
    for task in tasks[:10]:
        await asyncio.sleep(0.04)
        queue.turns.end(turn, 100, 10)
        turn = await task
    with pytest.raises(Overloaded, match="before its deadline"):
        await late
    assert time.monotonic() - began < 1.5
    assert queue.waiting() == 190
    for task in tasks[10:]:
        task.cancel()


async def test_nodes_that_join_are_noticed_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "CHECK_S", 0.02)
    queue = Queue(1, shared=True)
    await queue.turns.take(A, call(), SIZE)
    task = asyncio.create_task(queue.turns.take(A, call(), SIZE))
    await until(lambda: queue.waiting() == 1)
    queue.capacity = Capacity(8, 1e9)
    assert (await asyncio.wait_for(task, 1)).begun


def test_pace_counts_the_time_in_which_requests_waited() -> None:
    pace = ThroughputEstimate()
    pace.done(1000.0, 1.0)
    assert pace.rate == 0
    pace.busy(10.0, True)
    for second in range(11, 16):
        pace.done(50.0, second)
    assert 45 <= pace.rate <= 55
    pace.busy(15.0, False)
    pace.busy(1000.0, True)
    pace.done(50.0, 1001.0)
    assert 45 <= pace.rate <= 55
