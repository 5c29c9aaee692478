"""What waits in a router, in what pools are scaled by: seconds of a prefill node, and decode nodes."""

from __future__ import annotations

import asyncio
import time
from math import inf

import pytest

from kvferry.placement.capacity import Capacity, capacity
from kvferry.protocol.errors import NoNodes
from kvferry.protocol.lease import Load, Rates
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.arrival_rate import ArrivalRate
from kvferry.router.tenants.backlog import DEFAULT_SEQUENCES, Backlog, Waiting
from kvferry.router.tenants.scheduler_slots import SchedulerSlots, Size
from kvferry.router.tenants.tenant import Tenant
from tests.api_parts import Api, FakeCluster, says
from tests.fake_workers import PROMPT, Bench, collect, decode, lease_of
from tests.waiting import until

NODES = Capacity(sequences=16, prompt_per_s=3000.0, decodes=2, prefills=3)


def backlog(waiting: Waiting, now: Capacity, held: PendingRequests | None = None) -> Backlog:
    return Backlog(lambda: waiting, held or PendingRequests(), lambda: now)


def test_leases_tell_how_many_nodes_share_the_rate_and_the_seats_and_how_many_seats_are_taken() -> None:
    rates, load = Rates(prefill_tokens_per_s=500.0), Load(running_requests=3, open_grants=1, waiting_requests=9)
    leases = [lease_of(f"p{i}", "prefill", rates=rates, load=load) for i in range(3)]
    leases += [lease_of(f"d{i}", "decode", max_num_seqs=8, load=load) for i in range(2)]
    assert capacity(leases) == Capacity(16, 1500.0, 2, 3, 8)


def test_what_waits_for_prompts_is_seconds_and_what_waits_for_seats_is_nodes() -> None:
    waiting = Waiting(sequences=4, prompt=2000)
    assert backlog(waiting, NODES).prefill_s() == 2.0
    assert backlog(waiting, NODES).decode_nodes() == 0.0
    full = Capacity(16, 3000.0, 2, 3, taken=16)
    assert backlog(waiting, full).prefill_s() == 0.0
    assert backlog(waiting, full).decode_nodes() == 0.5
    half = Capacity(16, 3000.0, 2, 3, taken=8)
    assert (backlog(waiting, half).prefill_s(), backlog(waiting, half).decode_nodes()) == (1.0, 0.25)


def test_a_queue_asks_for_nodes_for_what_comes_and_not_for_all_that_came() -> None:
    full = Capacity(16, 3000.0, 2, 3, taken=16)
    queue = Waiting(sequences=400, prompt=0, seconds=60.0, ratio=1.5)
    assert backlog(queue, full).decode_nodes() == 2 * (0.5 + 0.5), (
        "half as much again comes; half a node each drains it"
    )
    shrinks = queue._replace(ratio=0.5)
    assert backlog(shrinks, full).decode_nodes() == 0.0
    assert backlog(shrinks._replace(seconds=12.0), full).decode_nodes() == pytest.approx(-0.8), "fewer would do"
    assert backlog(queue._replace(ratio=inf), full).decode_nodes() == 50.0, "nothing begins: seats for all"
    assert backlog(Waiting(ratio=0.5), full).decode_nodes() == 0.0


def test_sequences_that_come_are_compared_with_those_that_begin_of_late() -> None:
    flow = ArrivalRate()
    assert flow.ratio == 1.0
    flow.arrived(4, 10.0)
    assert flow.ratio == inf
    flow.started(2, 10.0)
    assert flow.ratio == 2.0
    for second in range(11, 100):
        flow.arrived(2, second)
        flow.started(4, second)
    assert flow.ratio == pytest.approx(0.5, rel=0.01)


def test_what_is_held_asks_both_pools_by_what_the_last_nodes_were() -> None:
    now, held = NODES, PendingRequests()
    found = Backlog(Waiting, held, lambda: now)
    assert (found.prefill_s(), found.decode_nodes(), found.unplaced()) == (0, 0, 0)
    now = Capacity()
    held.enter("a", 1500)
    held.enter("b", 500)
    assert (found.prefill_s(), found.decode_nodes(), found.unplaced()) == (2.0, 0.25, 2)
    held.leave("a")
    held.leave("a")
    held.enter("b", 600)
    assert (found.prefill_s(), found.unplaced()) == (0.6, 1)
    unseen = Backlog(Waiting, held, Capacity)
    assert unseen.prefill_s() == 600 / Rates().prefill_tokens_per_s
    assert unseen.decode_nodes() == 1 / DEFAULT_SEQUENCES


async def test_turns_tell_what_waits_and_what_left() -> None:
    turns, tenant, now = SchedulerSlots(lambda: Capacity(1)), Tenant("a"), time.monotonic()
    call = RequestContext("c", arrival=now, deadline=now + 60)
    begun = [await turns.take(tenant, call, Size(1, 100, 10)) for _ in range(2)]
    tasks = [asyncio.create_task(turns.take(tenant, call, Size(n, 100 * n, 10))) for n in (1, 2)]
    await until(lambda: turns.waiting[:2] == (3, 300))
    tasks[1].cancel()
    await until(lambda: turns.waiting[:2] == (1, 100))
    turns.end(begun[0], 100, 1)
    turns.end(begun[1], 100, 1)
    await tasks[0]
    assert turns.waiting[:2] == (0, 0)


async def test_a_router_without_nodes_shows_whom_it_holds_until_one_comes() -> None:
    async with Bench([], max_wait_s=10) as bench:
        found = Backlog(Waiting, bench.cluster.held, bench.cluster.capacity)
        bench.metrics.scaling.follow("m", found.prefill_s, found.decode_nodes, found.unplaced)

        def sample(name: str) -> float | None:
            return bench.metrics.registry.get_sample_value(name, {"model_name": "m"})

        tasks = [asyncio.create_task(collect(bench.start(4))) for _ in range(3)]
        await until(lambda: sample("kvferry_requests_held") == 3)
        rate = Rates().prefill_tokens_per_s
        assert sample("kvferry_prefill_backlog_seconds") == pytest.approx(3 * len(PROMPT) / rate)
        assert sample("kvferry_decode_pressure") == 3 / DEFAULT_SEQUENCES
        tasks[0].cancel()
        await until(lambda: sample("kvferry_requests_held") == 2)
        await bench.add(decode("d1"))
        for task in tasks[1:]:
            await task
        assert sample("kvferry_requests_held") == sample("kvferry_prefill_backlog_seconds") == 0


async def test_who_is_told_that_none_comes_is_held_no_longer() -> None:
    async with Bench([], max_wait_s=0.2) as bench:
        with pytest.raises(NoNodes):
            await collect(bench.start(4))
        assert (bench.cluster.held.requests, bench.cluster.held.tokens) == (0, 0)


async def test_a_scrape_of_the_router_tells_them_by_model() -> None:
    api = Api(FakeCluster(says("x " * 10), gap_s=0.02))
    api.cluster.takes = Capacity(1, 1000.0, 1, 1)
    tasks = [asyncio.create_task(api.complete(prompt=[7] * 50, max_tokens=9)) for _ in range(5)]
    await until(lambda: api.sample("kvferry_requests_queued") == 3)
    api.cluster.held.enter("x", 1000)
    page = (await api.http.get("/metrics")).text
    assert 'kvferry_requests_held{model_name="SmolLM2-135M-Instruct"} 1.0' in page
    assert api.sample("kvferry_prefill_backlog_seconds") == pytest.approx(3 * 50 / 1000 + 1)
    assert api.sample("kvferry_decode_pressure") == 1
    api.cluster.held.leave("x")
    assert {(await task).status_code for task in tasks} == {200}
    assert api.sample("kvferry_prefill_backlog_seconds") == api.sample("kvferry_decode_pressure") == 0
