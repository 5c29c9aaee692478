"""A request that kills its process ends alone, and those that were lost with it do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.placement.types import Placement
from kvferry.protocol.errors import FatalRequest, KvferryError, NodeDown
from kvferry.protocol.messages import PrefillRequest
from kvferry.router.dispatch.failures import Failure, Work, failure
from kvferry.router.dispatch.poison_requests import CLEARED_TOKENS, MEMORY_S, SHARING_COST_S, PoisonRequests, Suspect
from kvferry.router.dispatch.retry_policy import MAX_FAILURES, RetryPolicy
from tests.fake_workers import (
    CRASH,
    DEADLY,
    PROMPT,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    honest_prefill,
    ids,
    lease_of,
    prefill,
)
from tests.waiting import until

N1, N2, N3 = ("n1", 1), ("n2", 1), ("n3", 1)
DEADLY_PROMPT = (DEADLY, *PROMPT)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lose(
    deaths: PoisonRequests, suspect: Suspect, node: Any, delivered: int = 0, goes_to: Any = (), work: Work = "decode"
) -> None:
    deaths.died(node, {work}, suspect, delivered)
    deaths.move(suspect, goes_to)


def test_whoever_is_alone_with_its_second_death_is_to_blame() -> None:
    deaths, suspect, fresh = PoisonRequests(Clock()), Suspect(), Suspect()
    lose(deaths, suspect, N1, 3, [N2])
    with pytest.raises(FatalRequest, match="2 nodes"):
        deaths.died(N2, {"decode"}, suspect, 4)
    lose(deaths, fresh, N2)
    assert fresh.losses == 1, "who was there for the first time is none to blame"


def test_a_node_that_computed_and_one_that_decoded_may_have_died_by_chance_a_third_did_not() -> None:
    deaths, suspect = PoisonRequests(Clock()), Suspect()
    lose(deaths, suspect, N1, goes_to=[N2], work="prefill")
    lose(deaths, suspect, N2, goes_to=[N3], work="decode")
    with pytest.raises(FatalRequest, match="3 nodes"):
        deaths.died(N3, set(), suspect, 0)
    deaths.clear(suspect)
    lose(deaths, suspect, N1, work="prefill")
    with pytest.raises(FatalRequest, match="2 nodes"):
        deaths.died(N2, {"prefill", "decode"}, suspect, 0)


def test_a_decode_node_that_is_alone_with_a_request_has_both_works_until_tokens_come() -> None:
    p1, d1 = lease_of("p1", "prefill"), lease_of("d1", "decode")
    apart, alone, ends = (Placement(*nodes, 0, 0, 0) for nodes in ((p1, d1), (None, d1), (p1, None)))
    for node, placement, decoding, works in (
        (p1, apart, False, {"prefill"}),
        (d1, apart, False, {"decode"}),
        (d1, alone, False, {"prefill", "decode"}),
        (d1, alone, True, {"decode"}),
        (p1, ends, False, {"prefill"}),
    ):
        assert failure(0, NodeDown("x"), (node,), placement, decoding=decoding).works == works


def test_of_two_that_lost_two_nodes_together_neither_is_and_they_are_parted() -> None:
    deaths, one, two = PoisonRequests(Clock()), Suspect(), Suspect()
    for suspect in (one, two):
        lose(deaths, suspect, N1, goes_to=[N2])
    for suspect in (one, two):
        lose(deaths, suspect, N2)
    deaths.move(one, [N3])
    assert deaths.forbidden_nodes(two) == {N3}
    with pytest.raises(FatalRequest, match="3 nodes"):
        deaths.died(N3, {"decode"}, one, 0)
    deaths.clear(one)
    assert not deaths.forbidden_nodes(two)


def test_who_got_on_is_cleared() -> None:
    deaths, suspect = PoisonRequests(Clock()), Suspect()
    assert not suspect.cleared_by(1000)
    lose(deaths, suspect, N1, 10, [N2])
    assert deaths.any
    assert not suspect.cleared_by(10 + CLEARED_TOKENS - 1)
    assert suspect.cleared_by(10 + CLEARED_TOKENS)
    deaths.clear(suspect)
    assert not deaths.any
    lose(deaths, suspect, N2, 20)
    assert suspect.losses == 1


def test_suspects_are_shunned_and_the_worst_are_left_alone() -> None:
    deaths, one, two, fresh = PoisonRequests(Clock()), Suspect(), Suspect(), Suspect()
    lose(deaths, one, N1, goes_to=[N2])
    lose(deaths, two, N1, goes_to=[N2, N3])
    assert deaths.sharing_costs(fresh) == {N2: 2 * SHARING_COST_S, N3: SHARING_COST_S}
    assert deaths.sharing_costs(one) == {N2: SHARING_COST_S, N3: SHARING_COST_S}
    assert not deaths.forbidden_nodes(one)
    two.losses = 2
    deaths.move(two, [N3])
    assert deaths.forbidden_nodes(one) == {N3}
    assert deaths.forbidden_nodes(two) == {N2}
    assert not deaths.forbidden_nodes(fresh)


def test_a_death_is_heard_of_one_by_one_and_forgotten() -> None:
    clock = Clock()
    deaths, one, two = PoisonRequests(clock), Suspect(1, Counter(["decode"])), Suspect(1, Counter(["decode"]))
    for suspect in (one, two):
        deaths.move(suspect, [N1])
    for suspect in (one, two):
        lose(deaths, suspect, N1, goes_to=[N1])
    deaths.clear(two)
    clock.now += MEMORY_S + 1
    with pytest.raises(FatalRequest):
        deaths.died(N1, {"decode"}, one, 0)


def test_failures_are_counted_since_the_request_got_on() -> None:
    retry_policy, node = RetryPolicy(), lease_of("d1", "decode")
    for delivered in range(3 * MAX_FAILURES):
        retry_policy.next_step(Failure(delivered, NodeDown("x"), (node,)), delivered, ())
        assert retry_policy.excluded == {("d1", 1)}
    for _ in range(MAX_FAILURES - 1):
        retry_policy.next_step(Failure(0, NodeDown("x"), (node,)), 99, ())
    with pytest.raises(NodeDown):
        retry_policy.next_step(Failure(0, NodeDown("x"), (node,)), 99, ())


async def test_it_takes_two_decode_nodes_and_no_innocent_stream() -> None:
    """It had taken all four, and every stream on them."""
    async with Bench([decode(f"d{i}", step_s=0.02) for i in range(4)], max_wait_s=10) as bench:
        prompts = [(100 + i, *PROMPT[1:]) for i in range(8)]
        streams = [asyncio.create_task(collect(bench.start(60, prompt))) for prompt in prompts]
        await until(lambda: all(worker.running for worker in bench.workers.values()))
        with pytest.raises(FatalRequest, match="2 nodes") as caught:
            await collect(bench.start(50, DEADLY_PROMPT))
        assert caught.value.status == 500
        assert [ids(await stream) for stream in streams] == [expected(prompt, 60) for prompt in prompts]
        assert len(bench.cluster.usable("decode")) == 2
        assert not bench.cluster.deaths.any


async def test_it_takes_two_prefill_nodes() -> None:
    async def dies(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        if request.job.token_ids[0] == DEADLY:
            await asyncio.sleep(0.05)
            yield CRASH
            return
        await asyncio.sleep(0.1)
        async for answer in honest_prefill(worker, request):
            yield answer

    workers = [prefill(f"p{i}", prefill_script=dies) for i in range(4)]
    async with Bench([*workers, decode("d1"), decode("d2")], max_wait_s=10) as bench:
        innocent = [asyncio.create_task(collect(bench.start(10))) for _ in range(8)]
        await asyncio.sleep(0.02)
        with pytest.raises(FatalRequest):
            await collect(bench.start(10, DEADLY_PROMPT))
        assert [ids(await task) for task in innocent] == [expected(PROMPT, 10)] * 8
        assert len(bench.cluster.usable("prefill")) >= 2


async def test_where_all_share_the_only_node_it_is_found_and_the_others_go_on() -> None:
    """The node is restarted each time, as a supervisor does."""
    async with Bench([decode("d1", step_s=0.01)], max_wait_s=10) as bench:

        async def restart() -> None:
            for epoch in range(2, 20):
                await until(lambda: not bench.cluster.usable("decode"), 60)
                await bench.add(decode("d1", epoch=epoch, step_s=0.01))
                await until(lambda: bench.cluster.usable("decode"))

        restarts = asyncio.create_task(restart())
        tasks = [asyncio.create_task(collect(bench.start(40))) for _ in range(5)]
        await until(lambda: bench["d1"].running == 5)
        with pytest.raises(KvferryError) as caught:
            await collect(bench.start(40, DEADLY_PROMPT))
        assert isinstance(caught.value, FatalRequest)
        assert [ids(await task) for task in tasks] == [expected(PROMPT, 40)] * 5
        restarts.cancel()
        assert bench["d1"].epoch <= 4
