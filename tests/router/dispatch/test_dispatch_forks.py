"""Dispatches that fork from another one: beside it while it is there, and like any other where it is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.messages import PrefillRequest, TokenDelta
from kvferry.router.dispatch.dispatch import RequestDispatch
from tests.fake_workers import CRASH, PROMPT, Bench, FakeWorker, collect, decode, expected, first_token, ids, prefill
from tests.waiting import until


async def begun(bench: Bench, max_tokens: int = 400) -> RequestDispatch:
    """One that has its first token and goes on."""
    dispatch = bench.start(max_tokens)
    outputs = aiter(dispatch)
    assert dispatch.fork is None
    await anext(outputs)
    bench.begun.append(outputs)  # type: ignore[attr-defined]
    return dispatch


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench([prefill(), prefill("p2"), decode(), decode("d2"), decode("d3")]) as bench:
        bench.begun = []  # type: ignore[attr-defined]
        yield bench
        for outputs in bench.begun:  # type: ignore[attr-defined]
            await outputs.aclose()


async def test_forks_go_to_the_decode_node_of_their_leader_and_name_it(bench: Bench) -> None:
    leader = await begun(bench)
    assert leader.route
    assert leader.route.prefill
    home = leader.route.decode
    for _ in range(3):
        fork = bench.start(4, fork_of=leader.fork)
        assert ids(await collect(fork)) == expected(PROMPT, 4)
        assert fork.route
        assert (fork.route.prefill, fork.route.decode) == (None, home)
    named = [job.fork_of for job in bench[home or ""].jobs]
    assert named == ["", *[leader.fork.request_id] * 3]  # type: ignore[union-attr]
    assert bench[home or ""].jobs[0].request_id == named[1]


async def test_forks_of_one_that_lost_its_node_go_elsewhere(bench: Bench) -> None:
    leader = await begun(bench)
    assert leader.route
    home, fork_of = leader.route.decode or "", leader.fork
    bench[home].crash()
    await until(lambda: len(bench.cluster.usable("decode")) == 2)
    fork = bench.start(4, fork_of=fork_of)
    assert ids(await collect(fork)) == expected(PROMPT, 4)
    assert fork.route
    assert fork.route.decode not in (None, home)


async def test_a_fork_whose_node_dies_under_it_climbs_the_ladder(bench: Bench) -> None:
    leader = await begun(bench)
    assert leader.route
    home = bench[leader.route.decode or ""]
    home.crash_after = home._deltas + 12
    fork = bench.start(20, fork_of=leader.fork)
    assert ids(await collect(fork)) == expected(PROMPT, 20)
    assert bench.retries()["another_decode"] >= 1
    others = [job for name in ("d1", "d2", "d3") if name != home.node_id for job in bench[name].jobs]
    assert any(job.attempt and job.fork_of for job in others)


async def test_a_fork_of_one_that_ended_on_prefill_goes_there() -> None:
    async def ends(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        first = first_token(request.job)
        delta = TokenDelta(request.job.request_id, 0, 0, (7,), None, "stop", 7, first.delta.reuse)
        yield type(first)(delta, 0.0, 0.0)

    async with Bench([prefill(prefill_script=ends), prefill("p2", prefill_script=ends), decode()]) as bench:
        leader = bench.start(8)
        await collect(leader)
        assert leader.route
        assert leader.fork
        assert (leader.fork.node or ("",))[0] == leader.route.prefill
        for _ in range(4):
            fork = bench.start(8, fork_of=leader.fork)
            await collect(fork)
            assert fork.route
            assert fork.route.prefill == leader.route.prefill


async def test_the_first_failure_of_a_fork_leaves_it_a_fork() -> None:
    async def dies(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield CRASH

    async with Bench([prefill(), decode()]) as bench:
        leader = bench.start(1)
        await collect(leader)
        bench["p1"].prefill_script = dies
        fork = bench.start(1, fork_of=leader.fork)
        assert ids(await collect(fork)) == expected(PROMPT, 1)
        assert bench["d1"].jobs[-1].fork_of == leader.fork.request_id  # type: ignore[union-attr]
