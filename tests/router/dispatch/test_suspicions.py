"""A request on a node that may hang gets a second attempt elsewhere, and keeps the first until a token decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvferry.protocol.lease import Load
from kvferry.protocol.messages import PrefillRequest, Pulse
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.nodes.token_streams import LOST
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
    prefill,
)
from tests.waiting import until

STANDS, MOVES = Pulse(engine_s=0.9, usual_s=0.02), Pulse(usual_s=0.02)
LINK_STANDS = Pulse(link_s=0.9, usual_s=0.02)
TOKENS = 60


async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


async def streaming(bench: Bench) -> tuple[asyncio.Task[Any], str, str]:
    """Start a stream; return its task, its decode node and the other one."""
    bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
    task = asyncio.create_task(collect(bench.start(TOKENS)))
    await until(lambda: any(bench[name]._made for name in ("d1", "d2")))
    here, there = ("d1", "d2") if bench["d1"].running else ("d2", "d1")
    return task, here, there


def false_suspicions(bench: Bench) -> float:
    (metric,) = bench.metrics.false_suspicions.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


async def test_a_stream_goes_on_elsewhere_while_its_node_is_silent() -> None:
    """It stood still until the node was lost, twice as long."""
    async with Bench([prefill(), decode("d1"), decode("d2")], silence_s=1.0) as bench:
        task, here, there = await streaming(bench)
        bench[here].frozen = True
        paused_s = await until(lambda: bench[there]._made)
        assert paused_s < LOST * 1.0 - 0.2
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {"suspicion": 1}
        assert false_suspicions(bench) == 0
        assert bench.nodes.entries[here, 1].suspected


async def test_a_stream_goes_on_elsewhere_while_a_step_of_its_node_stands() -> None:
    async with Bench([prefill(), decode("d1"), decode("d2")]) as bench:
        task, here, there = await streaming(bench)
        bench[here].step_s, bench[here].pulse = 30.0, STANDS
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench[there].running == 0
        assert bench.retries() == {"suspicion": 1}
        await until(lambda: bench[here].cancels)
        assert false_suspicions(bench) == 0
        bench[here].pulse = MOVES
        await until(lambda: not bench.nodes.entries[here, 1].suspected)


async def test_a_node_that_comes_back_keeps_its_stream() -> None:
    async with Bench([prefill("p1"), decode("d1"), decode("d2")]) as bench:
        task, here, there = await streaming(bench)
        bench[there].step_s = 30.0
        bench["p1"].prefill_script = hang
        bench[here].step_s, bench[here].pulse = 0.8, STANDS
        await until(lambda: bench.retries())
        bench[here].step_s, bench[here].pulse = 0.003, MOVES
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {"suspicion": 1}
        assert false_suspicions(bench) == 1
        assert not bench[here].cancels
        await until(lambda: bench["p1"].answering == 0)


async def test_a_prompt_on_a_prefill_node_whose_step_stands_is_computed_elsewhere_too() -> None:
    async with Bench([prefill("p1", prefill_script=hang), decode("d1"), decode("d2")]) as bench:
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: bench["p1"].prefills)
        await bench.add(prefill("p2"))
        await until(lambda: ("p2", 1) in bench.nodes.entries and bench.nodes.entries["p2", 1].open)
        bench["p1"].pulse = STANDS
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"suspicion": 1}
        assert bench["p1"].prefills[0].job.request_id != bench["p2"].prefills[0].job.request_id


async def test_a_prefill_nodes_token_does_not_say_that_the_decode_node_is_well() -> None:
    """The second attempt was given up for it, and the stream stood still until the decode node was lost."""
    go, stands = asyncio.Event(), "d1"

    async def waits(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        await go.wait()
        yield first_token(request.job)
        if request.target.node_id != stands:
            worker.peers[request.target.node_id].decode(request.job, 1)
        yield SILENCE

    workers = [prefill("p1", prefill_script=waits), decode("d1"), decode("d2")]
    async with Bench(workers) as bench:
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        dispatch = bench.start(6)
        task = asyncio.create_task(collect(dispatch))
        await until(lambda: bench["p1"].prefills)
        stands = bench["p1"].prefills[0].target.node_id
        bench[stands].pulse = STANDS
        await until(lambda: len(bench["p1"].prefills) == 2)
        go.set()
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"suspicion": 1}
        assert false_suspicions(bench) == 0
        assert dispatch.route.prefill == "p1"
        await until(lambda: bench["p1"].answering == 0)


async def test_tokens_behind_a_missing_one_do_not_say_that_it_will_come() -> None:
    """A prefill node froze between its commit and its first token's way to the router."""

    async def commits(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        await until(lambda: bench.retries())
        worker.peers[request.target.node_id].decode(request.job, 1)
        yield SILENCE

    async def waits(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        await until(lambda: any(bench[name]._made for name in ("d1", "d2")))
        await asyncio.sleep(0.1)
        async for answer in honest_prefill(worker, request):
            yield answer

    async with Bench([prefill("p1", prefill_script=commits), decode("d1"), decode("d2")]) as bench:
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: bench["p1"].prefills)
        await bench.add(prefill("p2", prefill_script=waits))
        await until(lambda: ("p2", 1) in bench.nodes.entries and bench.nodes.entries["p2", 1].open)
        bench["p1"].pulse = STANDS
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"suspicion": 1}
        assert false_suspicions(bench) == 0


@pytest.mark.parametrize("grants", [True, False])
async def test_a_request_that_waits_for_a_ship_over_a_standing_link_is_begun_elsewhere_too(grants: bool) -> None:
    """Whether its first token is out or its blocks are not even granted: it waited until the link had stood for 2 s."""
    stands = "d1"

    async def waits(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        if request.target.node_id != stands:
            async for answer in honest_prefill(worker, request):
                yield answer
            return
        if grants:
            yield first_token(request.job)
        yield SILENCE

    async with Bench([prefill("p1", prefill_script=waits), decode("d1")]) as bench:
        bench.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: bench["p1"].prefills)
        await bench.add(decode("d2"))
        await until(lambda: ("d2", 1) in bench.nodes.entries and bench.nodes.entries["d2", 1].open)
        bench["d1"].pulse = LINK_STANDS
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"suspicion": 1}
        assert false_suspicions(bench) == 0


async def test_a_stream_that_decodes_needs_no_link() -> None:
    async with Bench([prefill("p1"), decode("d1"), decode("d2")]) as bench:
        for name in ("d1", "d2"):
            bench[name].step_s = 0.02
        task, here, there = await streaming(bench)
        bench[here].pulse = LINK_STANDS
        await until(lambda: bench.nodes.entries[here, 1].link_suspected)
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {}
        assert not bench[there].jobs


async def test_a_prefill_node_that_has_done_its_part_matters_no_more() -> None:
    async with Bench([prefill("p1"), prefill("p2"), decode("d1"), decode("d2")]) as bench:
        for name in ("d1", "d2"):
            bench[name].step_s = 0.02
        task, _, _ = await streaming(bench)
        used = "p1" if bench["p1"].prefills else "p2"
        bench[used].pulse = STANDS
        await until(lambda: bench.nodes.entries[used, 1].suspected)
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {}


async def test_nothing_is_begun_elsewhere_without_room() -> None:
    full = Load(active_blocks=100, granted_blocks=300, free_blocks=0, total_blocks=100)
    async with Bench([decode("d1"), decode("d2", changes={"load": full})]) as bench:
        task, here, there = await streaming(bench)
        assert here == "d1"
        bench[here].step_s, bench[here].pulse = 0.6, STANDS
        await until(lambda: bench.nodes.entries[here, 1].suspected)
        bench[here].step_s, bench[here].pulse = 0.003, MOVES
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert not bench[there].jobs
        assert bench.retries() == {}


async def test_a_node_that_comes_while_the_stream_s_own_may_hang_takes_it() -> None:
    """Nobody looked again: the stream stood still until its node was lost."""
    async with Bench([prefill("p1"), decode("d1")]) as bench:
        task = asyncio.create_task(collect(bench.start(TOKENS)))
        await until(lambda: bench["d1"]._made)
        bench["d1"].step_s, bench["d1"].pulse = 30.0, STANDS
        await until(lambda: bench.nodes.entries["d1", 1].suspected)
        await asyncio.sleep(0.1)
        await bench.add(decode("d2"))
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {"suspicion": 1}


async def test_a_second_attempt_whose_own_node_may_hang_is_replaced() -> None:
    """Two faults were waited for one after the other: the stream stood still until a node was lost."""
    async with Bench([decode("d1"), decode("d2")]) as bench:
        task, here, there = await streaming(bench)
        bench[there].step_s = bench[here].step_s = 30.0
        bench[here].pulse = STANDS
        await until(lambda: bench[there].jobs)
        bench[there].pulse = STANDS
        await until(lambda: bench.nodes.entries[there, 1].suspected)
        await bench.add(decode("d3"))
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {"suspicion": 2}
        await until(lambda: bench[here].cancels and bench[there].cancels)
        assert false_suspicions(bench) == 0


async def test_new_requests_avoid_a_suspected_node_while_there_is_another() -> None:
    async with Bench([decode("d1", pulse=STANDS), decode("d2")]) as bench:
        await until(lambda: bench.nodes.entries["d1", 1].suspected)
        for _ in range(4):
            assert ids(await collect(bench.start(3))) == expected(PROMPT, 3)
        assert not bench["d1"].jobs
    async with Bench([decode("d1", pulse=STANDS)]) as bench:
        await until(lambda: bench.nodes.entries["d1", 1].suspected)
        assert ids(await collect(bench.start(3))) == expected(PROMPT, 3)
        assert bench.retries() == {}


async def test_a_stream_that_leaves_a_draining_node_is_not_begun_elsewhere_besides() -> None:
    async with Bench([prefill(), decode("d1"), decode("d2")]) as bench:
        task, here, _ = await streaming(bench)
        bench[here].step_s, bench[here].move_wait_s = 0.05, 0.5
        await bench.store.announce(replace(bench[here].lease, state="draining"))
        await until(lambda: bench[here].moves)
        bench[here].pulse = STANDS
        await until(lambda: bench.nodes.entries[here, 1].suspected)
        bench[here].pulse = MOVES
        assert ids(await task) == expected(PROMPT, TOKENS)
        assert bench.retries() == {"move": 1}


async def test_looks_for_other_nodes_are_spaced() -> None:
    """2000 streams of one node that may hang looked 8000 times a second, for 0.2 ms each."""
    async with Bench([decode("d1")]) as bench:
        looks = bench.cluster.looks
        times = [looks.at(5.0) for _ in range(500)]
        assert all(later - sooner > 0.001 for sooner, later in pairwise(times))
        assert looks.at(60.0) == 60.0, "those of before cost nothing later"
